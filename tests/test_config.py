"""Configuration: precedence, round trip, and messages that name the path and the nearest right name."""

from pathlib import Path

import pytest

from nanorl.config import Config, JsonlData
from nanorl.config_load import from_json, load_config, to_json
from nanorl.errors import ConfigError


def test_flags_win_over_settings_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nlr = 1e-3\nbetas = [0.9, 0.98]\n[run]\nsteps = 9\nseed = 4\n[model]\nname = "tiny"\n')
    config = load_config(
        path, ["run.steps=7", "run.seed=5", "reward.name=my.module:function"], {"run.steps": 3, "run.dir": None}
    )
    assert (config.run.steps, config.run.seed, config.train.lr, config.train.betas) == (3, 5, 1e-3, (0.9, 0.98))
    assert (config.model.name, config.reward.name, config.run.dir) == ("tiny", "my.module:function", None)


def test_unions_are_chosen_by_type() -> None:
    config = load_config(sets=["data.type=jsonl", "data.path=a.jsonl"])
    assert config.data == JsonlData(path="a.jsonl")


def test_json_round_trip() -> None:
    config = load_config(sets=["data.type=jsonl", "data.path=a.jsonl", "algo.dual_clip=3"])
    assert from_json(to_json(config)) == config
    assert from_json(to_json(Config())) == Config()


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("train.lrr=1", ["'train.lrr'", "'train.lr'"]),
        ("trian.lr=1", ["'trian'", "'train'"]),
        ("train.lr=0", ["train.lr", "> 0", "got 0"]),
        ("train.lr=nan", ["train.lr", "finite"]),
        ("run.steps=many", ["run.steps: expected a whole number, got 'many'"]),
        ("algo.std=stddev", ["algo.std", "'stddev'", "population, sample, none"]),
        ("rollout.temperature=0", ["rollout", "temperature", "above 0"]),
        ("rollout.group_size=1", ["group_size", "at least 2"]),
        ("data.type=csv", ["data.type", "'csv'"]),
        ("steps=3", ["section.key=value", "'steps=3'", "train"]),
        ("train.lr", ["section.key=value"]),
        ("run.steps.x=3", ["run.steps: expected a whole number, got a table"]),
        ("train.lr=''", ["train.lr: expected a number, got ''"]),
        ("train.betas=[1]", ["train.betas: expected a list of length 2, got [1]"]),
        ("engine.type=trt", ["engine.type: invalid choice, got 'trt'. Choices: auto, torch, sglang"]),
        ("engine.url=''", ["engine.url: expected something like http://127.0.0.1:30000, got ''"]),
        ("engine.url=http://host:port", ["engine.url", "'http://host:port'"]),
        ("reward.name=math", ["reward.name: unknown reward 'math'", "arithmetic", "module:function"]),
        ("run.resume=last", ["run.resume: expected `latest` or the step", "'last'"]),
    ],
)
def test_bad_settings_name_path_value_and_way_out(setting: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(sets=[setting])
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"), [("[train\n", "no valid TOML"), ("train = 3\n", "train"), ("\xff", "readable")]
)
def test_bad_files_are_named(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=part):
        load_config(path)
    with pytest.raises(ConfigError, match="readable config file"):
        load_config(tmp_path / "missing.toml")
