"""Every join of a path with a name uses `resolve_below` or is listed here with its reason."""

from pathlib import Path

import pytest

from tests.joined_paths import joins, paths_of_sources

LISTED = "the name is that of a file or folder which the code has just listed"
OWN = "the code that calls it passes constants"
MADE = "the code has made the name, from a digest, a time, a number or a checked name"
LIBRARY = "the library that made the name also reads it"
PYTHON = "the name of a Python module or package"
USER = "the user typed it, and may name any file"
FLYTE = "Flyte's names of a run have only letters, digits and -"
SANDBOX = "in the file system of a sandbox, which has no other files"

ALLOWED = {
    "nemo_rl_core/backends/training/dtensor/lora.py": {
        "ours / name": LISTED,
        "theirs / name": LISTED,
    },
    "nemo_rl_core/checkpoints/model_code.py": {
        "target / name": LISTED,
        "source / name": LISTED,
        "folder / name": OWN,
    },
    "nemo_rl_core/checkpoints/hub.py": {
        "hub_folder('model', name) / 'refs' / (revision or 'main')": USER,
        "Path(constants.HF_HUB_CACHE) / '--'.join([f'{kind}s', *name.split('/')])": USER,
    },
    "nemo_rl_core/checkpoints/manager.py": {
        "self.root / old.name.removeprefix('.').removesuffix(_OLD)": LISTED,
    },
    "nemo_rl_core/checkpoints/object_saves.py": {
        "folder / name": LISTED,
        "copies / name": LISTED,
    },
    "nemo_rl_core/checkpoints/tensors.py": {
        "folder / f'{_WEIGHTS}.{len(parts)}{files.ASIDE}'": MADE,
        "folder / f'{_WEIGHTS}.{number}{files.ASIDE}'": MADE,
        "folder / file": MADE,
    },
    "nemo_rl_core/checkpoints/written_files.py": {
        "folder / name": LISTED,
    },
    "nemo_rl_core/converters/float32_copy.py": {
        "folder / file": LIBRARY,
    },
    "nemo_rl_core/converters/folders.py": {
        "target.with_name(f'.{target.name}.{uuid.uuid4().hex[:8]}{files.ASIDE}')": MADE,
        "folder / name": OWN,
    },
    "nemo_rl_core/converters/gguf_file.py": {
        "target.with_name(target.name + '.part')": MADE,
    },
    "nemo_rl_core/converters/materialize.py": {
        "Store.default().cache / 'remote' / digest": MADE,
    },
    "nemo_rl_core/converters/hub.py": {
        "folder / name": LISTED,
    },
    "nemo_rl_core/data/datasets/files.py": {
        "folder / item.digest[:32]": MADE,
    },
    "nemo_rl_core/data/pretrained.py": {
        "model_folder / name": OWN,
    },
    "nemo_rl_core/data/tokenized.py": {
        "Store.default().cache / 'tokens' / f'{_key(file, tokenizer, offered)}.arrow'": MADE,
    },
    "nemo_rl_core/distributed/isolation.py": {
        "Store.default().cache / 'packages' / file_name": MADE,
        "Store.default().cache / 'packages' / digest": MADE,
        "folder.with_name(f'.{digest}.{uuid.uuid4().hex[:8]}{ASIDE}')": MADE,
    },
    "nemo_rl_core/distributed/private_ray.py": {
        "Path(base) / f'ray-{os.getuid()}'": MADE,
    },
    "nemo_rl_core/distributed/process_group.py": {
        "folder / (f'{name}-rank_' if engine is None else f'{name}-engine_{engine}-rank_')": MADE,
    },
    "nemo_rl_core/environments/sandbox/launcher.py": {
        "work / name": SANDBOX,
        "Path('/old') / path.relative_to('/')": SANDBOX,
    },
    "nemo_rl_core/environments/sandbox/slots.py": {
        "Path('/proc', pids.pop(), 'task')": LISTED,
    },
    "nemo_rl_core/history/liveness.py": {
        "store.runs / execution": LISTED,
    },
    "nemo_rl_core/history/queries.py": {
        "self.store.artifacts / name": USER,
    },
    "nemo_rl_core/history/signed.py": {
        "store.runs / execution": MADE,
        "path.with_name(f'key-{os.getpid()}-{secrets.token_hex(4)}')": MADE,
    },
    "nemo_rl_core/history/stored_paths.py": {
        "store.root / area": MADE,
    },
    "nemo_rl_core/maintenance/collect.py": {
        "store.runs / name": LISTED,
        "store.artifacts / name": LISTED,
        "store.artifacts / artifact_name": LISTED,
        "store.work / name": LISTED,
        "store.runs / run.name": LISTED,
        "parent / path.stem": LISTED,
        "folder.with_name(folder.name + suffix)": OWN,
    },
    "nemo_rl_core/maintenance/disk_usage.py": {
        "store.artifacts / name": LISTED,
        "store.runs / run": LISTED,
    },
    "nemo_rl_core/maintenance/survey.py": {
        "store.runs / matches[0]": LISTED,
        "store.artifacts / name": LISTED,
        "store.runs / name": LISTED,
    },
    "nemo_rl_core/maintenance/verify.py": {
        "store.root / finding.path": LISTED,
    },
    "nemo_rl_core/produce.py": {
        "store.artifacts / name": MADE,
        "store.reads / f'{name}.json'": MADE,
    },
    "nemo_rl_core/store/files.py": {
        "path.with_name(f'.{path.name}.{uuid.uuid4().hex[:8]}{ASIDE}')": MADE,
        "Path(parent, name)": LISTED,
        "path.with_name(f'.{path.name}.{uuid.uuid4().hex[:8]}{DISCARDED}')": MADE,
    },
    "nemo_rl_core/store/node_cache.py": {
        "self._files / digest": MADE,
        "self._coming / f'{digest}.{num_bytes}'": MADE,
    },
    "nemo_rl_core/store/paths.py": {
        "root / checked_name(name, source=source)": "it checks the name",
    },
    "nemo_rl_core/store/source_digest.py": {
        "_ROOT.joinpath(*module.split('.'))": PYTHON,
        "_ROOT.joinpath(*package.split('.'))": PYTHON,
        "folder / name": PYTHON,
    },
    "nemo_rl_core/store/source_files.py": {
        "module_file.parent / '__pycache__' / f'sources.{version[:16]}.json'": MADE,
    },
    "nemo_rl_core/store/store.py": {
        "folder / f'.probe.{uuid.uuid4().hex[:8]}{files.ASIDE}'": MADE,
        "self.work / _work_name(stage, key)": MADE,
        "folder.with_name(folder.name + '.lock')": MADE,
        "self.artifacts / artifact_name(stage, content_hash)": MADE,
        "self.damaged / f'{path.name}.{uuid.uuid4().hex[:8]}'": MADE,
        "folder.with_name(folder.name + '.done')": MADE,
    },
    "nemo_rl_core/telemetry/budget.py": {
        "Store.default().gpu_seconds / run.execution": FLYTE,
        "self._folder / f'{run.task}-{run.attempt}-{uuid4().hex[:8]}.json'": FLYTE,
    },
    "nemo_rl_core/telemetry/run_log.py": {
        "store.runs / name": MADE,
    },
    "nemo_rl_core/telemetry/trackers.py": {
        "Path(config.folder) / run": MADE,
    },
    "nemo_rl_core/telemetry/waiting.py": {
        "Path(parent, name)": LISTED,
    },
    "nemo_rl_core/ui/templating.py": {
        "STATIC / name": OWN,
    },
    "tasks/cli/store/gc.py": {
        "store.runs / name": LISTED,
        "store.artifacts / name": LISTED,
        "store.work / name": LISTED,
    },
    "tasks/cli/records/names.py": {
        "Store.default().artifacts / name": USER,
    },
    "tasks/cli/recipe/recipe_pipeline.py": {
        "RECIPES / f'{recipe}.yaml'": USER,
    },
    "tasks/cli/recipe/run.py": {
        "_WORKFLOWS / f'{pipeline}.py'": OWN,
    },
    "tasks/cluster_check.py": {
        "Path(current_context().working_directory) / f'{key}.bin'": MADE,
        "Store.default().root / 'cluster-check' / key": MADE,
    },
    "tasks/ray_cluster/cluster_volume.py": {
        "inputs / uuid.uuid4().hex": MADE,
    },
    "tasks/flyte/code_secrets.py": {
        "folder / name": LISTED,
        "Path(root, name)": LISTED,
    },
    "tasks/plan_tasks/failures.py": {
        "folder / f'{name}.recipe.json'": MADE,
        "folder / f'{name}.json'": MADE,
        "folder / name": MADE,
    },
    "tasks/recipes/recipe_file.py": {
        "RECIPES / f'{name}.yaml'": USER,
    },
}

OPEN = """
import os, shutil, tarfile, zipfile
from dataclasses import dataclass
from pathlib import Path

class Kept:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, name): return self._folder / name                      # open
    def below(self, name): return self._folder / "files" / name         # open

@dataclass
class Store:
    root: Path

    @property
    def artifacts(self) -> Path: return self.root / "artifacts"

def listing(store, names, manifest):
    return [store.artifacts / name for name in names]                   # open

def manifest(store, record): return store.artifacts / record["name"]    # open
def text(folder: Path, name): return folder / f"{name}.json"            # open
def joined(folder: Path, name): return folder.joinpath(name)            # open
def two(folder, name): return Path(folder, name)                        # open
def with_os(folder, name): return os.path.join(folder, name)            # open
def sibling(path: Path, name): return path.with_name(name)               # open
def last(folder: Path, name): return folder / Path(name).name           # open
def removed(folder: Path, key, base): return folder / key.removeprefix(base)  # open
def nested(folder: Path, name):
    def inner():
        target = folder / "x"
        return target / name                                            # open
    return inner
def archive(path, folder): zipfile.ZipFile(path).extractall(folder)     # open
def tree(system, source, folder): system.get(source, folder, recursive=True)  # open

def constant(folder: Path): return folder / "model" / "config.json"
def entries(folder: Path): return [folder / each.name for each in folder.iterdir()]
def listed(folder: Path): return [folder / name for name in list_files(folder)]
def number(folder: Path, step): return folder / f"step-{step:08d}"
def divided(total, count): return total / count
def both(folder: Path): return [folder / name for name in ("a", "b")]
def checked(folder: Path, name): return resolve_below(folder, name, source="x")
"""


@pytest.mark.slow
def test_each_join_with_an_external_name_is_checked() -> None:
    all_joins = list(joins(paths_of_sources()))
    new = [each for each in all_joins if each.text not in ALLOWED.get(each.file, {})]
    lines = [f"{each.file}:{each.line}: {each.text}" for each in new]
    assert not new, "use resolve_below, or add the join and its reason here:\n" + "\n".join(lines)
    allowed = {(file, text) for file, texts in ALLOWED.items() for text in texts}
    unused = allowed - {(each.file, each.text) for each in all_joins}
    assert not unused, "these joins are gone: remove them from the list"


def test_joins_are_found_by_their_types(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(OPEN)
    expected = [n for n, line in enumerate(OPEN.splitlines(), 1) if line.endswith("# open")]
    assert sorted({each.line for each in joins([source])}) == expected
