"""Recipes: every shipped one loads, its header can be pasted, and bad values are named."""

import dataclasses
import shlex
from pathlib import Path

import pytest
import yaml

from spechead import files
from spechead.data.synthesis.synthesize import SynthesizeOptions
from spechead.errors import UserError
from spechead.evaluation.evaluate import EvalOptions
from spechead.options import parse
from spechead.training.recipe import OptimConfig, Recipe, load_recipe

SHIPPED = sorted(path.stem for path in files.shipped("recipes").glob("*.yaml"))


def test_the_recipes_that_should_ship() -> None:
    wanted = {
        "eagle-smollm2",
        "eagle-llama-2-7b",
        "hass-smollm2",
        "hass-llama-3-8b",
        "eagle3-smollm2",
        "hydra-smollm2",
        "hydra-mistral-7b",
        "medusa-smollm2",
        "eagle3-smollm2-long",
        "eagle3-llama-3.1-8b",
        "medusa-qwen3-8b",
        "medusa2-smollm2",
        "medusa2-vicuna-7b",
    }
    assert set(SHIPPED) == wanted


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_loads_by_name_and_by_path(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe == load_recipe(str(files.shipped(f"recipes/{name}.yaml"))) == load_recipe(f"recipes/{name}.yaml")
    assert recipe.out == f"runs/{name}"
    method = name.partition("-")[0]
    assert recipe.head.kind == {"hass": "eagle", "medusa2": "medusa"}.get(method, method)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_commands_of_a_header_are_real(name: str) -> None:
    """Each command of the header parses with the options that the program has today."""
    commands = header_commands(files.shipped(f"recipes/{name}.yaml"))
    trained = [words[words.index("spechead") + 2 :] for words in commands if words[0] == "torchrun"]
    assert len(trained) == 2, "a launch line and one with overrides"
    assert Recipe.from_cli(trained[0]) == load_recipe(name)
    assert Recipe.from_cli(trained[1]) != load_recipe(name)
    for words in commands:
        if words[:2] == ["spechead", "eval"]:
            assert parse(EvalOptions, words[2:], "").head == f"runs/{name}/head"
        if words[:3] == ["spechead", "data", "synthesize"]:
            assert str(parse(SynthesizeOptions, words[3:], "").out) in load_recipe(name).data.sources()


def header_commands(path: Path) -> list[list[str]]:
    """The commands in a recipe's leading comment: joined at backslashes, split as a shell would."""
    lines = [line[1:].strip() for line in path.read_text().split("\n\n")[0].splitlines()]
    text = "\n".join(lines).replace("\\\n", " ")
    starts = ("torchrun ", "spechead ")
    commands = [line.partition(":")[2].strip() or line for line in text.splitlines() if ":" in line] + text.splitlines()
    return [shlex.split(line) for line in commands if line.startswith(starts)]


def test_to_dict_is_a_recipe_again(tmp_path: Path) -> None:
    recipe = load_recipe("eagle3-smollm2", ["--optim.betas", "[0.8, 0.99]", "--head.tree", "chain:2"])
    file = tmp_path / "resolved.yaml"
    file.write_text(yaml.safe_dump(recipe.to_dict()))
    assert load_recipe(str(file)) == recipe


def test_flags_override_the_file_wherever_they_stand() -> None:
    before = Recipe.from_cli(["--optim.lr", "0.5", "--config", "eagle3-smollm2"])
    after = Recipe.from_cli(["--config=eagle3-smollm2", "--optim.lr", "0.5"])
    assert before == after == dataclasses.replace(before, optim=dataclasses.replace(before.optim, lr=0.5))


def test_an_option_of_the_head_is_merged_into_those_of_the_file() -> None:
    options = load_recipe("eagle3-smollm2").head.options
    assert load_recipe("eagle3-smollm2", ["--head.options.steps", "2"]).head.options == options | {"steps": 2}


def test_without_a_config_the_defaults_hold() -> None:
    recipe = Recipe.from_cli([])
    assert recipe == dataclasses.replace(Recipe(), out="runs/eagle3")


def test_sources_find_what_ships() -> None:
    recipe = load_recipe(overrides=["--data.train", "shipped:data/sample.jsonl", "--data.train", "hf:a/b:train"])
    assert recipe.data.sources() == [str(files.shipped("data/sample.jsonl")), "hf:a/b:train"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optim.lr 0", "option optim.lr: must be above 0, got 0.0"),
        ("--optim.lr .inf", "option optim.lr: must be above 0, got inf"),
        ("--optim.epochs=-1", "option optim.epochs: must be above 0"),
        ("--optim.betas [0.9,1.0]", "option optim.betas: must be at least 0 and below 1, got"),
        ("--optim.warmup_share 1", "option optim.warmup_share: must be at least 0 and below 1, got 1.0"),
        ("--optim.min_lr_share 1.5", "option optim.min_lr_share: must be at least 0 and at most 1"),
        ("--optim.batch_size 0", "option optim.batch_size: must be at least 1"),
        (
            "--optim.batch_size 6 --optim.micro_batch_size 4",
            "option optim.batch_size: 6 is not a multiple of .* 4 x 1 processes",
        ),
        ("--data.max_length 0", "option data.max_length: must be at least 1"),
        ("--data.train=[]", "option data.train: must name at least one source"),
        ("--data.train=", "option data.train: must name at least one source"),
        ("--seed 4294967296", "option seed: must be at least 0 and below 4294967296"),
        ("--engine.threads 9999", "option engine.threads: must be at least 0 and at most .*, got 9999"),
        ("--data.validation_share 1.0", "option data.validation_share: must be at least 0 and below 1"),
        ("--engine.zero_stage 4", "option engine.zero_stage: expected one of"),
        ("--log.wandb on", "option log.wandb: expected one of disabled, offline, online, got on"),
        ("--optim.ema 1", "option optim.ema: must be at least 0 and below 1, got 1.0"),
        ("--optim.patience=-1", "option optim.patience: must be at least 0, got -1"),
        ("--optim.patience 3 --data.validation_share 0", "optim.patience: 3 counts validations, and there are none"),
        ("--optim.patience 3 --log.validate_every 0", "optim.patience: 3 .* set data.validation_share and log.valid"),
        (
            "--head.kind medusa --engine.gradient_checkpointing true",
            "engine.gradient_checkpointing: a medusa head has no decoder steps",
        ),
        ("--log.keep 0", "option log.keep: must be at least 1"),
        ("--head.kind eagle9", r"option head.kind: no head eagle9 \(known: .*eagle3.*\)"),
        ("--head.options.stepps 3", r"unknown option head.options.stepps \(known: .*steps.*\)"),
        ("--head.options.steps 0", "option head.options.steps: must be at least 1, got 0"),
        ("--head.kind medusa --head.options.decay -1", "option head.options.decay: must be at least 0, got -1.0"),
        ("--head.options.draft_vocab_size -3", "option head.options.draft_vocab_size: must be at least 0, got -3"),
        (
            "--head.kind hydra --head.options.dropout 1",
            "option head.options.dropout: must be at least 0 and below 1, got 1.0",
        ),
        ("--head.kind eagle --head.options.noise .nan", "option head.options.noise: must be at least 0, got nan"),
        ("--head.init_vocabulary extend", "option head.init_vocabulary: extend applies to .*: set head.init_from"),
        ("--head.options.steps many", "option head.options.steps: expected int, got many"),
        ("--head.tree chain", "chain"),
        ("--optim.learning_rate 1", "unknown option optim.learning_rate"),
        ("--config nowhere", "option config: no recipe nowhere, specify a YAML file or one of .*eagle3-llama-3.1-8b, "),
        ("--config mine/eagle3-smollm2.yaml", "no recipe mine/eagle3-smollm2.yaml"),
        ("--config", "option config: specify the name"),
    ],
)
def test_bad_values_are_named_in_one_line(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Recipe.from_cli(flags.split())
    assert "\n" not in str(caught.value)


def test_an_unknown_key_of_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optim:\n  learning_rate: 1\n")
    with pytest.raises(UserError, match=r"unknown key optim.learning_rate in .*mine.yaml \(known: optim.lr, "):
        load_recipe(str(file))


def test_accumulation_makes_up_the_batch() -> None:
    assert OptimConfig(batch_size=8, micro_batch_size=2).accumulation(2) == 2
    with pytest.raises(UserError, match="option optim.batch_size: 8 is not a multiple of .* 2 x 3 processes"):
        OptimConfig(batch_size=8, micro_batch_size=2).accumulation(3)


@pytest.mark.parametrize(
    ("epochs", "batch", "steps", "samples", "expected"),
    [(2, 4, 0, 10, 5), (1, 4, 0, 10, 3), (0.01, 4, 0, 10, 1), (2, 4, 7, 10, 7)],
)
def test_steps_of_a_run(epochs: float, batch: int, steps: int, samples: int, expected: int) -> None:
    assert OptimConfig(epochs=epochs, batch_size=batch, steps=steps).total_steps(samples) == expected
