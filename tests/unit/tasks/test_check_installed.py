"""`make check-gpu`: files of two wheels, and modules that do not import, are found."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECK = Path(__file__).resolve().parents[3] / "deployment" / "requirements" / "check_installed.py"


@pytest.fixture
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_installed", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str, record: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(record)


def test_a_file_with_two_versions_is_named(check: ModuleType, tmp_path: Path) -> None:
    wheel(
        tmp_path,
        "old",
        "bindings/runtime.py,sha256=A,1\nbindings/__init__.py,sha256=S,1\n"
        "old-1.0.dist-info/RECORD,,\n../../bin/tool,sha256=X,1\n",
    )
    wheel(
        tmp_path,
        "new",
        "bindings/runtime.py,sha256=B,1\nbindings/__init__.py,sha256=S,1\n"
        "../../bin/tool,sha256=Y,1\nbindings/new.py,sha256=C,1\n",
    )
    files = check.installed_files([str(tmp_path)])
    assert set(files) == {"bindings/runtime.py", "bindings/__init__.py", "bindings/new.py"}
    # Equal files do no harm, and no import searches scripts.
    assert check.conflicts(files) == ["bindings/runtime.py: new 1.0, old 1.0"]


def test_a_module_that_does_not_import_is_named_with_the_reason(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "made_for_the_check"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "__main__": "raise SystemExit(1)",
        "fine": "",
        "broken": "import sys\nsys.no_such_name",
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = list(check.modules([package.name]))
    assert names == [f"{package.name}{end}" for end in ("", ".broken", ".fine")]
    assert check.failures(names) == [
        "import made_for_the_check.broken: AttributeError: module 'sys' has no attribute "
        "'no_such_name'"
    ]
    for name in names:
        sys.modules.pop(name, None)


def test_every_package_of_the_project_is_imported(check: ModuleType) -> None:
    assert [name for name in check._OURS if importlib.util.find_spec(name) is None] == []
    names = set(check.modules(["nemo_rl_core.backends"]))
    assert "nemo_rl_core.backends.training.megatron.backend" in names
