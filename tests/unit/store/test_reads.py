"""Files, modules and variables that user code reads count for later cache hits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_core.config.single_turn import RewardFunction
from nemo_rl_core.environments.contents import reward_content
from nemo_rl_core.produce import StageInputs
from nemo_rl_core.store import watching
from nemo_rl_core.store.reads import add_to_record, read_record
from nemo_rl_core.store.store import Store

REPOSITORY = Path(__file__).resolve().parents[3]

REWARD = """
import importlib
import json
import os
import os.path
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "lib"))

import in_lib  # in a folder on sys.path
import helper  # as always

constant = importlib.import_module("constant")
computed = importlib.import_module("".join(["com", "puted"]))
by_function = __import__("by" + "_function")
SCALE = os.environ.get("SCALE", "1")
LIMITS = json.loads((HERE / "data" / "limits.json").read_text())


@cache
def words():
    with open(os.path.join(os.path.dirname(__file__), "words.txt")) as file:
        return file.read().split()


def noise():
    (HERE / "log.txt").open("a").write("scored\\n")
    (HERE / "own_cache.json").write_text("{}")
    json.loads((HERE / "own_cache.json").read_text())
    dict(os.environ), os.environ.copy(), {**os.environ}
    os.environ["PATH"], os.environ.get("RAY_ADDRESS"), os.getenv("MY_API_KEY")


def optional():
    path = HERE / "tested.txt"
    text = path.read_text() if path.exists() else ""
    try:
        return text + Path("tried.txt").read_text()
    except FileNotFoundError:
        return text


def score(completion):
    import in_function

    noise()
    exec((HERE / "executed.py").read_text())
    listed = [each.read_text() for each in sorted((HERE / "lists").glob("*.txt"))]
    parts = [in_function.X, helper.X, in_lib.X, constant.X, computed.X, by_function.X]
    parts += [os.environ["WEIGHT"], os.getenv("OFFSET"), SCALE, LIMITS, words(), listed]
    return float(len(str(parts) + optional()))
"""

FILES = {
    "my_rewards.py": REWARD,
    "constant.py": "X = 1\n",
    "computed.py": "import below\nX = below.X\n",
    "below.py": "X = 1\n",
    "by_function.py": "X = 1\n",
    "helper.py": "X = 1\n",
    "in_function.py": "X = 1\n",
    "lib/in_lib.py": "X = 1\n",
    "executed.py": "1 + 1\n",
    "data/limits.json": "[1, 2]",
    "words.txt": "one two",
    "lists/a.txt": "a",
    "unrelated.txt": "1",
    "unrelated.py": "X = 1\n",
}
VARIABLES = {"WEIGHT": "2", "SCALE": "1", "MY_API_KEY": "secret", "UNRELATED": "1"}

NAMES = ("PATH", "NEMO_RL_HOME", "PYTHONPATH", "OFFSET", "RAY_ADDRESS", *VARIABLES)

EDITS: dict[str, tuple[str, str | None]] = {
    "a module that is imported": ("helper.py", "X = 12\n"),
    "by import_module with a constant": ("constant.py", "X = 12\n"),
    "by import_module with a computed name": ("computed.py", "import below\nX = 12\n"),
    "by such a module": ("below.py", "X = 12\n"),
    "by __import__": ("by_function.py", "X = 12\n"),
    "in a folder on sys.path": ("lib/in_lib.py", "X = 12\n"),
    "in a function": ("in_function.py", "X = 12\n"),
    "code that is executed": ("executed.py", "1 + 2\n"),
    "a file in a folder at import": ("data/limits.json", "[1, 3]"),
    "a file that is opened late and kept": ("words.txt", "one two three"),
    "a file of equal length": ("words.txt", "one tw0"),
    "a file that is gone": ("words.txt", None),
    "a file of a list": ("lists/a.txt", "b"),
    "a new file of a list": ("lists/b.txt", "b"),
    "a file that was tested for": ("tested.txt", "now it is there"),
    "a file that was tried": ("tried.txt", "now it is there"),
    "$WEIGHT": ("$WEIGHT", "3"),
    "$OFFSET, not set before": ("$OFFSET", "1"),
    "$SCALE at import": ("$SCALE", "2"),
    "$WEIGHT, not set any more": ("$WEIGHT", None),
}
UNRELATED: dict[str, tuple[str, str | None]] = {
    "an unrelated file": ("unrelated.txt", "2"),
    "an unrelated module": ("unrelated.py", "X = 2\n"),
    "a new module": ("another.py", "X = 2\n"),
    "the same content": ("words.txt", FILES["words.txt"]),
    "a comment in a module": ("computed.py", "import below  # again\nX = below.X\n"),
    "a file that the reward writes": ("log.txt", "empty"),
    "a cache of the reward": ("own_cache.json", "[]"),
    "an unrelated variable": ("$UNRELATED", "2"),
    "a variable of the machine": ("$RAY_ADDRESS", "auto"),
    "a key of an account": ("$MY_API_KEY", "another"),
}

STAGE = """
import os
import sys

from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.object_source import object_source
from nemo_rl_core.telemetry.events import StageSaved, publish

ran = []


def run(settings, call, code=frozenset()):
    def work(folder):
        ran.append("resumed" if (folder / "saved").exists() else "ran")
        (folder / "score.txt").write_text(str(call()("completion")))
        if "--killed" in sys.argv:
            (folder / "saved").touch()
            publish(StageSaved(1))
            os._exit(9)
        return StageResult("dataset", "text")

    inputs = StageInputs("scored", settings, code=code)
    if "--key" in sys.argv:
        return print(inputs.key)
    made = produce(inputs, work)
    print(inputs.key, ran[0] if ran else "hit", (made / "score.txt").read_text())


def run_object(score):
    source = object_source(score)
    assert not source.unknown, source.unknown
    run({"source": source.digest}, lambda: score, source.code)
"""
FORMS = {
    "recipe": """
from stage import run
from nemo_rl_core.config.single_turn import RewardFunction
from nemo_rl_core.environments.contents import reward_content
from nemo_rl_core.environments.rewards.functional_reward import load_function

target = "my_rewards:score"
load_function(target)  # like the checks before a run
environment = RewardFunction(target=target)
settings = {"environment": environment.model_dump(), "content": reward_content(environment)}
run(settings, lambda: load_function(target))
""",
    "module": """
from stage import run_object
from my_rewards import score

run_object(score)
""",
    "script": "import stage\n"
    + REWARD
    + "\n\nif __name__ == '__main__':\n    stage.run_object(score)\n",
}


class User:
    """A user's folder with a reward and a program that scores with it in a stage."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.form = folder / "user", form
        self.store = Store(folder / "store")
        for name, text in {**FILES, "stage.py": STAGE, "main.py": FORMS[form]}.items():
            self.write(name, text)

    def write(self, name: str, text: str | None) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True) if text is None else path.write_text(text)

    def run(self, *arguments: str, code: int = 0) -> list[str]:
        """Runs the program; returns the stage's key, `ran` or `hit`, and the score."""
        done = subprocess.run(
            [sys.executable, "main.py", *arguments],
            cwd=self.folder,
            env={name: os.environ[name] for name in NAMES if name in os.environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout.split()

    def has(self, key: str) -> bool:
        return self.store.published("scored", key) is not None

    def is_hit(self, key: str) -> bool:
        """Whether the stage with this key would be a cache hit."""
        if self.form == "recipe":
            environment = RewardFunction(target="my_rewards:score")
            settings = {"environment": environment.model_dump()}
            return self.has(
                StageInputs("scored", settings | {"content": reward_content(environment)}).key
            )
        # The key of a script covers everything that its source refers to.
        return self.has(key) and (self.form == "module" or self.has(*self.run("--key")))


@pytest.fixture
def user(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    created = User(tmp_path, request.param)
    monkeypatch.chdir(created.folder)
    monkeypatch.setenv("NEMO_RL_HOME", str(created.store.root))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OFFSET", raising=False)
    return created


def hits(
    user: User, key: str, edit: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> tuple[bool, bool]:
    """Returns whether there is a hit after an edit and after undoing it."""
    name, text = edit
    if name.startswith("$"):
        with monkeypatch.context() as patched:
            patched.delenv(name[1:]) if text is None else patched.setenv(name[1:], text)
            during = user.is_hit(key)
        return during, user.has(key)
    path = user.folder / name
    before = path.read_text() if path.exists() else None
    user.write(name, text)
    during = user.is_hit(key)
    user.write(name, before)
    return during, user.has(key)


@pytest.mark.parametrize(
    "user", ["recipe", "module", pytest.param("script", marks=pytest.mark.slow)], indirect=True
)
def test_every_edit_is_a_cache_miss_until_it_is_undone(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, how, score = user.run()
    assert (how, user.run()) == ("ran", [key, "hit", score])
    assert len(EDITS) == 20
    results = {name: hits(user, key, edit, monkeypatch) for name, edit in EDITS.items()}
    assert results == dict.fromkeys(EDITS, (False, True))
    same = {name: hits(user, key, edit, monkeypatch) for name, edit in UNRELATED.items()}
    assert same == dict.fromkeys(UNRELATED, (True, True))


@pytest.mark.slow
@pytest.mark.parametrize("user", FORMS, indirect=True)
def test_results_of_both_contents_are_kept(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    first = user.run()
    user.write("words.txt", "one two three")
    _, how, score = user.run()
    assert (how, user.run()[1]) == ("ran", "hit")
    assert score != first[2]
    user.write("words.txt", FILES["words.txt"])
    assert user.run() == [first[0], "hit", first[2]]
    monkeypatch.setenv("WEIGHT", "222")
    assert user.run()[1:] == ["ran", str(float(first[2]) + 2)]
    monkeypatch.setenv("WEIGHT", "2")
    assert user.run() == [first[0], "hit", first[2]]


@pytest.mark.slow
@pytest.mark.parametrize("user", ["recipe"], indirect=True)
def test_a_killed_stage_resumes_unless_its_inputs_have_changed(user: User) -> None:
    user.run("--killed", code=9)
    assert user.run()[1] == "resumed"
    user.write("words.txt", "one two three")
    user.run("--killed", code=9)
    user.write("words.txt", "one two three four")
    assert user.run()[1] == "ran"
    assert len(list(user.store.reads.iterdir())) == 2  # one per artifact


@pytest.mark.parametrize("user", ["recipe"], indirect=True)
def test_an_artifact_without_a_record_is_a_hit(user: User) -> None:
    user.run()
    (record,) = user.store.reads.iterdir()
    record.unlink()
    user.write("words.txt", "another")
    assert user.run()[1] == "hit"


@pytest.mark.parametrize("user", ["recipe"], indirect=True)
def test_records_contain_no_values(user: User) -> None:
    user.run()
    (record,) = user.store.reads.iterdir()
    (reads,) = read_record(record)
    assert "secret" not in record.read_text()
    assert not [name for name in reads if "KEY" in name or "PATH" in name]
    assert all(len(each) in (0, 64) for each in reads.values())
    assert "file ./words.txt" in reads


def test_equal_inputs_are_recorded_once(tmp_path: Path) -> None:
    path = tmp_path / "reads" / "a.json"
    add_to_record(path, {})
    assert not path.exists()
    one, other = {"file a": "1"}, {"file a": "2"}
    for reads in (one, one, other, one):
        add_to_record(path, reads)
    assert json.loads(path.read_text()) == [one, other]


def test_the_current_folder_is_watched_at_any_location() -> None:
    assert not watching._is_noise_from("/usr/src/app/words.txt", "/usr/src/app", None)
    assert watching._is_noise_from("/usr/share/dict/words", "/usr/src/app", None)
    assert watching._is_noise_from("/etc/hosts", "/", None)


def test_reads_of_a_worker_belong_to_the_stage_in_which_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, file = tmp_path / "reward_of_a_user.py", tmp_path / "settings.txt"
    file.write_text("1")
    code.write_text(f"open({str(file)!r}).read()")
    exec(compile(code.read_text(), code, "exec"), {"__name__": "reward_of_a_user"})
    reads = watching.report()
    assert reads.counts[str(code)] > 0

    def absorbed(report: watching.Report, *named: str) -> bool:
        with watching.watching(named) as watch:
            watching.absorb(report, "a worker")
        return "file ./settings.txt" in watch.reads()

    assert [absorbed(reads), absorbed(reads), absorbed(reads, str(code))] == [True, False, True]
    later = {**reads.counts, str(code): reads.counts[str(code)] + 1}
    assert absorbed(reads._replace(counts=later))
