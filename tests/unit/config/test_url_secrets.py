"""Secrets in addresses of a recipe are refused, and hidden in records of runs."""

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.judge import LLMJudge
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.card import model_card
from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.run_log import RunLog
from tasks.recipes import distillation, grpo, post_train, sweep

IMPORTED = (distillation, grpo, post_train, sweep)
"""Imported so that every config class is defined."""
SECRET = "hunter2"
ADDRESSES = [
    f"https://user:{SECRET}@host/v1",
    f"https://{SECRET}@host",
    f"http://user:p@ss:{SECRET}@host:80/",
    f"https://host/v1?api_key={SECRET}",
    f"https://host/v1?n=1&API-KEY={SECRET}#end",
    f"https://host/v1?api%5Fkey={SECRET}",
    f"https://host/v1;token={SECRET}",
    f"https://host/#access_token={SECRET}",
    f"https://host/?X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}",
    f"https://host/?Ocp-Apim-Subscription-Key={SECRET}",
    f"https://host/?sig={SECRET}",
    f"s3://key:{SECRET}@bucket/rows",
    f"mongodb+srv://user:{SECRET}@host/db",
    f"see https://host/a, and http://user:{SECRET}@host.",
    f"https://host/?next=https://user:{SECRET}@other",
]
HARMLESS = [
    "https://host/v1?max_tokens=5&tokenizer=x&keyboard=de&author=me",
    "s3://bucket/rows/*.jsonl",
    "https://host/@user/page",
    "me@example.com",
    "http://[::1]:8000/v1",
    "org/model@main",
    "token=x",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_secret_is_hidden_and_the_rest_stays(address: str) -> None:
    shown = redacted(address)
    assert SECRET not in shown
    assert "***" in shown
    assert redacted(shown) == shown
    assert SECRET not in redacted(json.dumps({"a": [address]}))


@pytest.mark.parametrize("address", HARMLESS)
def test_an_address_without_a_secret_is_left_as_it_is(address: str) -> None:
    assert redacted(address) == address


def _configs(kind: type[FrozenConfig] = FrozenConfig) -> Iterator[type[FrozenConfig]]:
    for each in kind.__subclasses__():
        yield each
        yield from _configs(each)


def _takes_text(annotation: Any) -> bool:
    return annotation is str or any(map(_takes_text, get_args(annotation)))


TEXTS = sorted(
    {
        (kind, name)
        for kind in _configs()
        for name, field in kind.model_fields.items()
        if _takes_text(field.annotation) and kind.__module__.startswith(("nemo_rl_core", "tasks"))
    },
    key=lambda each: (each[0].__qualname__, each[1]),
)


def test_every_text_of_every_config_is_checked() -> None:
    assert len(TEXTS) > 80
    for kind, name in TEXTS:
        for value in (ADDRESSES[0], [ADDRESSES[0]], {"a": {"b": ADDRESSES[0]}}):
            config = kind.model_construct(**{name: value})
            with pytest.raises(ConfigError, match=name) as raised:
                config._refuse_secrets_in_addresses()
            assert SECRET not in str(raised.value)


@pytest.mark.parametrize("address", [each for each in ADDRESSES if each.startswith("http")])
def test_the_setting_that_takes_the_secret_is_named(address: str) -> None:
    endpoint = {"kind": "endpoint", "url": address, "model": "m"}
    with pytest.raises(ConfigError, match="api_key_variable") as raised:
        LLMJudge.model_validate({"judge": endpoint})
    assert SECRET not in str(raised.value)
    for tracker, setting in (
        ({"kind": "mlflow", "tracking_uri": address}, "MLFLOW_TRACKING_PASSWORD"),
        ({"kind": "otlp", "endpoint": address}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ):
        with pytest.raises(ConfigError, match=setting):
            TrackingConfig.model_validate({"trackers": [tracker]})


def test_the_history_the_log_and_the_card_hide_secrets(tmp_path: Path) -> None:
    """This includes secrets in command lines, errors and records of earlier versions."""
    store = Store(tmp_path / "store")
    with RunLog.start(store) as log:
        logging.getLogger("httpx").warning("HTTP Request: POST %s", ADDRESSES[3])
        writer = HistoryWriter(store, log.folder.name)
        writer.begin(NewExecution("w", "r", ["run", *ADDRESSES], {"urls": ADDRESSES}, log.path))
        node = writer.begin_node("train", task="t.train", kind="task")
        folder = store.artifacts / "train-1"
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        config = {"judge": {"url": ADDRESSES[0]}, "data": {"kind": "file", "train": ADDRESSES[11]}}
        manifest = Manifest(
            kind="checkpoint", format="hf", stage="train", content_hash="ab" * 32, config=config
        )
        manifest.write(folder)
        end = NodeEnd("failed", made=[(folder, manifest)], error=f"refused: {ADDRESSES[0]}")
        writer.end_node(node, end)
        writer.end("failed", f"no answer from {ADDRESSES[4]}")
    with closing(sqlite3.connect(path_of(store))) as database:
        dumped = "\n".join(database.iterdump())
    assert "https://***@host/v1" in dumped
    assert SECRET not in dumped
    assert SECRET not in log.path.read_text()
    assert SECRET not in model_card(folder, evaluations=[])
