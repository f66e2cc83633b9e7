"""`nemo-rl run`: recipes with changes, dry runs, and the run itself."""

import json
import socket
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.database import open_for_writing, transaction
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.produce import NotMade, StageInputs, StageResult, dry_run, produce
from nemo_rl_core.store.store import Store
from tasks.cli.machine import flyte_cluster_check
from tasks.cli.recipe.recipe_pipeline import is_shipped, pipeline_of, refuse_other_pipeline
from tasks.cli.recipe.run_settings import TRAINING, _as_yaml, changes_of
from tasks.flyte import code_secrets
from tasks.ray_cluster import ray_stage
from workflows import cli
from workflows.cli import PIPELINES

REPOSITORY = Path(__file__).parents[4]


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli.group, ["run", *arguments])


def test_every_pipeline_has_a_name() -> None:
    files = {path.stem for path in (REPOSITORY / "workflows").glob("*.py")}
    others = {"__init__", "cli", "cluster_check", "collect_garbage", "common", "launch_plans"}
    assert files - others == set(PIPELINES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["seed"], "'seed' is not a setting"),
        (["=3"], "'=3' is not a setting"),
        (["grpo..steps=3"], "'grpo..steps=3' is not a setting"),
        (["name=a: b: c"], "the value of name is not YAML"),
        (["seed=1", "seed=2"], "seed is set twice"),
        (["grpo=1", "grpo.num_steps=2"], "grpo.num_steps is set twice"),
        (["grpo.num_steps=2", "grpo=1"], "grpo is set twice"),
    ],
)
def test_an_invalid_setting_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        changes_of(settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wait"], "--wait: only for a run on a cluster; add --remote"),
        (["--wait", "--project", "a"], "--wait, --project: only for a run on a cluster"),
    ],
)
def test_options_of_a_cluster_are_refused_without_one(options: list[str], message: str) -> None:
    result = invoked("sft", *options)
    assert result.exit_code == 2
    assert message in result.output


def flyte_config(folder: Path, endpoint: str) -> str:
    config = folder / "flyte.yaml"
    config.write_text(f"admin:\n  endpoint: dns:///{endpoint}\n  insecure: true\n")
    return str(config)


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_named_in_four_lines(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        result = invoked("sft", "--remote", "--flyte-config", flyte_config(tmp_path, endpoint))
    assert result.exit_code == 2
    lines = result.output[result.output.index("Error: ") :].splitlines()
    assert lines[0] == f"Error: the run cannot be launched, or waited for, on {endpoint}"
    assert [line.split(":")[0] for line in lines[1:]] == ["  expected", "  got", "  fix"]
    assert "Connection refused" in lines[2] or "UNAVAILABLE" in lines[2]
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize("command", [["run", "sft", "--remote"], ["cluster-check"]])
def test_images_that_a_cluster_cannot_pull_are_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEMO_RL_REGISTRY", raising=False)
    arguments = [*command, "--flyte-config", flyte_config(tmp_path, "flyte.invalid")]
    result = CliRunner().invoke(cli.group, arguments)
    assert result.exit_code == 2
    assert "NEMO_RL_REGISTRY is not set, so pods on flyte.invalid cannot" in result.output
    monkeypatch.setenv("NEMO_RL_REGISTRY", "registry.invalid/team")
    result = CliRunner().invoke(cli.group, arguments)
    assert "NEMO_RL_REGISTRY" not in result.output
    assert "on flyte.invalid" in result.output  # nothing answers there


@pytest.mark.parametrize("command", [["run", "sft", "--remote"], ["cluster-check"]])
def test_code_with_a_key_is_not_uploaded(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tls.pem").write_text("-----BEGIN PRIVATE" + " KEY-----\n")
    for user in (code_secrets, flyte_cluster_check):
        monkeypatch.setattr(user, "CHECKOUT", tmp_path)
    arguments = [*command, "--flyte-config", flyte_config(tmp_path, "localhost:1")]
    result = CliRunner().invoke(cli.group, arguments)
    assert result.exit_code == 2
    assert "files that would be uploaded with the code hold secrets" in result.output
    assert "got: tls.pem (a private key)" in result.output


def test_differences_are_shown_as_a_recipe_has_them() -> None:
    values = {"a": None, "b": True, "c": [1, "x"], "d": "off", "e": 1e-5}
    assert [_as_yaml(values, key) for key in "abcdef"] == [
        "null", "true", "[1, x]", "'off'", "1.0e-05", "not set",
    ]  # fmt: skip


def test_values_are_yaml() -> None:
    assert changes_of(["a=1e-5", "b=null", "c=[1, x]", "d={e: 2}", "g=", "h=a=b"]) == {
        "a": 1e-5,
        "b": None,
        "c": [1, "x"],
        "d": {"e": 2},
        "g": None,
        "h": "a=b",
    }


def test_changes_are_merged_into_the_recipe(tmp_path: Path) -> None:
    result = invoked(
        "grpo", "grpo_guess_number", "seed=3", "grpo.learning_rate=1e-5", "--print-config"
    )
    assert result.exit_code == 0, result.output
    config = yaml.safe_load(result.output)
    assert config["seed"] == 3
    assert config["grpo"]["learning_rate"] == 1e-5
    assert config["environment"]["kind"] == "guess_number"  # the recipe's
    assert config["grpo"]["num_iterations"] == 2
    # The printed config can be read as the same recipe.
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.output)
    assert invoked("grpo", str(printed), "--print-config").output == result.output


def test_the_default_recipe_is_used_without_a_recipe() -> None:
    config = yaml.safe_load(invoked("sft", "sft.num_steps=7", "--print-config").output)
    assert config["sft"]["num_steps"] == 7
    assert config["data"]["kind"] == "arithmetic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpro"], "did you mean 'grpo'?"),
        (["grpo", "grpo_arithmetik"], "there is no recipe 'grpo_arithmetik'"),
        (["grpo", "grpo.lerning_rate=1"], "unknown key 'grpo.lerning_rate'"),
        (["grpo", "seed=x", "grpo.num_steps_per_iteration=-1"], "grpo.num_steps_per_iteration"),
    ],
)
def test_mistakes_exit_with_2_and_a_message(arguments: list[str], message: str) -> None:
    result = invoked(*arguments, "--dry-run")
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_shipped_recipe_of_another_pipeline_is_refused_with_its_command() -> None:
    for pipeline, recipe in (("sft", "grpo_arithmetic"), ("grpo", "sft_arithmetic")):
        own_pipeline = recipe.partition("_")[0]
        for named in (recipe, str(REPOSITORY / "workflows" / "recipes" / f"{recipe}.yaml")):
            result = invoked(pipeline, named, "--dry-run")
            assert result.exit_code == 2, result.output
            assert f"this is a recipe for `{own_pipeline}`" in result.output
            assert f"fix: nemo-rl run {own_pipeline} {named}" in " ".join(result.output.split())
            assert "remove it" not in result.output


def test_a_file_based_on_another_pipelines_recipe_is_refused_for_its_keys(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("recipe: grpo_arithmetic\n")
    refused = invoked("sft", str(mine), "--print-config")
    assert refused.exit_code == 2
    assert f"fix: nemo-rl run grpo {mine}" in " ".join(refused.output.split())
    mine.write_text("recipe: sft_arithmetic\n")  # all keys are shared, so it may be intended
    assert invoked("grpo", str(mine), "--print-config").exit_code == 0
    mine.write_text("recipe: sft_arithmetic\nsft: {lerning_rate: 1}\n")
    assert "did you mean 'learning_rate'" in invoked("sft", str(mine), "--print-config").output


def test_every_shipped_recipe_is_for_one_pipeline() -> None:
    for path in (REPOSITORY / "workflows" / "recipes").glob("*.yaml"):
        assert is_shipped(path.stem)
        refuse_other_pipeline(pipeline_of(path.stem, PIPELINES), str(path), PIPELINES)


@pytest.mark.slow
def test_a_dry_run_prepares_and_stops_before_the_first_training(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[None] = []
    monkeypatch.setattr(ray_stage, "start_ray", lambda: started.append(None))
    result = invoked("grpo", "grpo_ci", "seed=5", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["seed:", "0", "->", "5"] in lines
    states = {line[0]: line[1] for line in lines if len(line) > 1}
    assert states["prepare_model"] == states["prepare_data"] == "prepared"
    assert states["train_sft"] == "runs"
    assert "grpo_iteration" not in states
    assert "0.50 M parameters" in result.output
    assert not started
    store = Store.default()
    made = {path.name.partition("-")[0] for path in store.artifacts.iterdir()}
    assert made == {"prepare_model", "tokenizer", "prepare_data"}
    assert not (own_store / "runs").exists() or not list((own_store / "runs").iterdir())

    again = invoked("grpo", "grpo_ci", "seed=5", "--dry-run")
    states = {
        line.split()[0]: line.split()[1] for line in again.output.splitlines() if "  " in line
    }
    assert states["prepare_model"] == states["prepare_data"] == "cached"


def record_run(*stages: tuple[str, float]) -> str:
    """Records a successful run of `sft_text` with stages of these durations in seconds.

    The last stage has another stage inside, whose time is included in its own.
    """
    store = Store.default()
    writer = HistoryWriter(store, "20260101T000000Z-aaaaaa")
    writer.begin(NewExecution("workflows.sft.sft", "sft_text", [], {}, Path("run.log")))
    for name, _ in stages:
        node = writer.begin_node(name, task=f"tasks.{name}", kind="task")
        writer.end_node(node, NodeEnd("succeeded"))
    inner = writer.begin_node("inner", task="tasks.inner", kind="task", parent=node)
    writer.end_node(inner, NodeEnd("succeeded"))
    writer.end("succeeded")
    with closing(open_for_writing(store)) as database, transaction(database):
        for node, (_, seconds) in enumerate(stages, start=1):
            database.execute("UPDATE nodes SET ended_at = started_at + ? WHERE id = ?",
                             (seconds, node))  # fmt: skip
    return "20260101T000000Z-aaaaaa"


@pytest.mark.slow
def test_a_dry_run_estimates_every_remaining_stage(own_store: Path) -> None:
    run = record_run(
        ("prepare_model", 5), ("prepare_data", 6),
        ("evaluate", 20), ("train_sft", 100), ("evaluate", 40), ("export", 2),
    )  # fmt: skip
    result = invoked("sft", "sft_text", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "evaluate                runs      20 s the last time" in result.output
    assert "  and everything after it: train_sft, evaluate, export\n" in result.output
    assert f"time: about 162 s, as the stages of run {run} took when they ran" in result.output
    (memory,) = [line for line in result.output.splitlines() if line.startswith("memory")]
    assert memory.startswith("memory of evaluate: ")
    assert memory.endswith("GiB of weights in float32 in each process that holds the model")


def test_training_stages_are_recognized_by_name() -> None:
    stages = {path.stem for path in (REPOSITORY / "tasks").glob("*.py")}
    named = {name for name in stages if name.startswith("train_") or name.endswith("_iteration")}
    assert set(TRAINING) == named | {"sweep_point"}


def test_a_dry_run_has_the_refusals_of_a_run(own_store: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n" + json.dumps({"a": 1}))
    settings = ["data.kind=file", f"data.train={rows}", "data.max_prompt_tokens=16"]
    result = invoked("grpo", "grpo_ci", *settings, "--dry-run")
    assert result.exit_code == 2, result.output
    assert "rows.jsonl" in result.output
    assert not list(own_store.glob("artifacts/train_sft*"))


CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "no"}]}
    for i in range(700)
]
PAIRS = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "0"} for i in range(10, 710)]
QUESTIONS = [{"prompt": f"{i}+2=", "answer": f"{i + 2}"} for i in range(10, 710)]


def with_rows(folder: Path, rows: list[dict[str, object]], model: str = "from_config") -> list[str]:
    file = folder / f"{len(list(folder.iterdir()))}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data={{kind: file, train: {file}, max_prompt_tokens: 64}}"
    return [f"model.kind={model}", data, "generation.max_new_tokens=8", "--dry-run"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "settings", "rows", "stages", "line"),
    [
        ("sft", [], CONVERSATIONS, ["train_sft"], "the data are conversations (messages)"),
        ("sft", ["evaluation=null"], CONVERSATIONS, ["train_sft"], ""),
        ("dpo", ["pairs.kind=data", "sft=null"], PAIRS, ["tokenize_pairs"], "held-out pairs give"),
        ("sft", ["evaluation=null"], QUESTIONS, ["train_sft"], ""),
        ("sft", ["promotion=null"], QUESTIONS, ["evaluate"], ""),
    ],
)
def test_rows_do_not_need_questions(
    own_store: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    pipeline: str,
    settings: list[str],
    rows: list[dict[str, object]],
    stages: list[str],
    line: str,
) -> None:
    model = "from_config" if "prompt" in rows[0] else "text_from_config"
    result = invoked(pipeline, *settings, *with_rows(tmp_path, rows, model))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [line[0] for line in lines if line[1:2] == ["runs"]] == stages
    messages = [each.getMessage() for each in caplog.records if "evaluated" in each.getMessage()]
    assert [line in each for each in messages] == ([True] if line else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "settings", "rows", "fault"),
    [
        (
            "grpo",
            [],
            CONVERSATIONS,
            "the train rows are conversations (messages), which",
        ),
        ("grpo", [], PAIRS, "preference pairs (chosen and rejected), which this recipe"),
        ("sft", [], PAIRS, "preference pairs (chosen and rejected), which this recipe"),
        (
            "sft",
            ["evaluation=null"],
            [{"prompt": f"say {i}"} for i in range(200)],
            "prompts without answers, which this",
        ),
        ("dpo", ["sft=null", "pairs.kind=data"], QUESTIONS, "prompts with answers, which this"),
        ("dpo", ["pairs.kind=data"], PAIRS, "sft cannot train on rows that are preference pairs"),
        ("post_train", ["pairs.kind=data"], PAIRS, "sft and grpo cannot train on rows that are"),
        ("distill", [], CONVERSATIONS, "conversations (messages), which this recipe"),
        ("ppo", [], CONVERSATIONS, "conversations (messages), which this recipe"),
        ("reward_model", ["sft=null"], CONVERSATIONS, "conversations (messages), which this"),
        ("evaluate", [], CONVERSATIONS, "the questions of an evaluation are conversations"),
        ("regression", ["baseline=null"], QUESTIONS, "needs a model to compare with"),
        ("evaluate", ["evaluation=null"], QUESTIONS, "this recipe only evaluates"),
        ("sft", ["export.model=promoted"], CONVERSATIONS, "needs the verdict of a promotion"),
        ("sft", ["export.model=promoted", "promotion=null"], QUESTIONS, "needs the verdict"),
        ("grpo", ["evaluation=null", "measure_base=true"], QUESTIONS, "switches evaluation off"),
    ],
)
def test_a_dry_run_refuses_rows_and_sections_that_a_stage_cannot_use(
    own_store: Path,
    tmp_path: Path,
    pipeline: str,
    settings: list[str],
    rows: list[dict[str, object]],
    fault: str,
) -> None:
    model = "from_config" if "+" in str(rows[0].get("prompt")) else "text_from_config"
    result = invoked(pipeline, *settings, *with_rows(tmp_path, rows, model))
    assert result.exit_code != 0, result.output
    assert fault in " ".join(f"{result.output} {result.exception}".split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "settings", "is_refused"),
    [
        ("dpo", ["pairs.kind=data", "sft=null"], False),
        ("dpo", ["pairs.kind=data", "sft=null", "dpo.validate_every_num_steps=2"], True),
        ("reward_model", ["pairs.kind=data", "sft=null"], True),
    ],
)
def test_validation_rows_may_be_questions_if_nothing_else_reads_them(
    own_store: Path, tmp_path: Path, pipeline: str, settings: list[str], is_refused: bool
) -> None:
    arguments = with_rows(tmp_path, PAIRS)
    questions_file = tmp_path / "asked.jsonl"
    questions_file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    data = arguments[1].replace("}", f", validation: {questions_file}}}")
    result = invoked(pipeline, *settings, arguments[0], data, *arguments[2:])
    text = " ".join(f"{result.output} {result.exception}".split())
    fault = "the validation rows are prompts with answers, which this recipe cannot validate on"
    assert (fault in text) == is_refused
    assert (result.exit_code != 0) == is_refused, text


def test_questions_of_an_evaluation_need_no_rows_to_train_on(
    own_store: Path, tmp_path: Path
) -> None:
    arguments = with_rows(tmp_path, CONVERSATIONS, "text_from_config")
    questions_file = tmp_path / "asked.jsonl"
    questions_file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    data = f"evaluation.data={{kind: file, validation: {questions_file}, max_prompt_tokens: 64}}"
    result = invoked("sft", data, *arguments)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    states = {line[0]: line[1] for line in lines if len(line) > 1}
    assert states["evaluate_questions"] == "prepared"
    assert states["evaluate"] == "runs"
    questions_file.unlink()
    missing = invoked("sft", data, *arguments)
    text = f"{missing.output} {missing.exception}"
    assert "evaluation.data.validation: no file" in text
    assert "evaluation.data.train: no file" not in text


def test_a_dry_run_reports_once_how_rows_are_read(
    own_store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "gsm8k.jsonl"
    questions = [{"question": f"{n}+1=", "answer": f"#### {n + 1}"} for n in range(20)]
    rows.write_text("\n".join(map(json.dumps, questions)))
    recipe = tmp_path / "grpo_mine.yaml"
    recipe.write_text(
        f"data: {{kind: file, train: {rows}, max_prompt_tokens: 16}}\n"
        "grpo: {num_prompts_per_step: 4}\n"
    )
    result = invoked("grpo", str(recipe), "--dry-run")
    assert result.exit_code == 0, result.output
    assert len([line for line in caplog.messages if "gsm8k: " in line]) == 1
    assert len([line for line in caplog.messages if "validation" in line]) == 1


def test_a_dry_run_names_rows_that_are_longer_than_the_context(
    own_store: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    sums = [{"prompt": f"{n}+{'0+' * (n % 4)}1=", "completion": str(n + 1)} for n in range(40)]
    rows.write_text("\n".join(map(json.dumps, sums)))
    recipe = tmp_path / "sft_mine.yaml"
    recipe.write_text(
        f"model: {{kind: from_config, max_position_embeddings: 12}}\n"
        f"data: {{kind: file, train: {rows}, validation_fraction: 0.1, max_prompt_tokens: 11}}\n"
        "generation: {max_new_tokens: 1}\n"
        "sft: {global_batch_size: 4}\n"
    )
    result = invoked("sft", str(recipe), "--dry-run")
    assert result.exit_code == 2, result.output
    assert "row has more than 12 tokens (the model's context): rows " in result.output
    assert invoked("sft", str(recipe), "data.overlong=drop", "--dry-run").exit_code == 0


def test_a_dry_run_that_fails_leaves_no_record(own_store: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "", "answer": "3"}\n')
    settings = ["data.kind=file", f"data.train={rows}", f"data.validation={rows}"]
    settings.append("data.max_prompt_tokens=16")
    result = invoked("grpo", "grpo_ci", *settings, "--dry-run")
    assert result.exit_code == 2, result.output
    assert "how to resume" not in result.output
    assert not (own_store / "failures").exists()


@pytest.mark.parametrize("place", ["file", "/proc/nope"])
def test_a_dry_run_fails_like_a_run_on_a_read_only_store(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / place))
    result = invoked("grpo", "grpo_ci", "--dry-run")
    assert result.exit_code == 2, result.output
    first, *rest = result.output.splitlines()  # no record of a failure, no traceback
    assert first.startswith("Error: ")
    assert str(tmp_path / place) in first
    assert [line.split(":")[0] for line in rest] == ["  expected", "  got", "  fix"]


def test_a_damaged_artifact_is_a_miss_of_a_dry_run(own_store: Path) -> None:
    made = []

    def work(folder: Path) -> StageResult:
        made.append(folder)
        (folder / "rows.txt").write_text("1")
        return StageResult("dataset", "text")

    inputs = StageInputs("stage", {"a": 1})
    artifact = produce(inputs, work)
    with dry_run():
        assert produce(inputs, work) == artifact
        (artifact / "rows.txt").write_text("damaged")
        with pytest.raises(NotMade):
            produce(inputs, work)
    assert len(made) == 1
