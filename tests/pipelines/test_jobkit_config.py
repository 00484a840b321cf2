"""From files and command lines to one configuration: what wins, what is refused, and in which words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import yaml
from pydantic import Field

from model.errors import JobError, UserError
from pipelines.jobkit import NOT_IDENTITY, ClusterConfig, JobConfig, PackConfig, ReadConfig, Section, config_hash, main
from pipelines.jobkit.cli import load_config, parse_arguments
from pipelines.jobkit.keys import list_keys


class TrainSection(Section):
    """How the stand-in job trains."""

    steps: int = Field(10, ge=1, description="optimizer steps")
    learning_rate: float = Field(1e-4, gt=0, description="peak learning rate")
    workers: int | Literal["auto"] = Field("auto", description="worker processes")


class ExtraSection(Section):
    """A section that may be absent."""

    rank: int = Field(4, ge=1, description="rank")


class StandInConfig(JobConfig):
    """A job that only reports its configuration."""

    output_name: ClassVar[str] = "stand_in/results.jsonl"

    train: TrainSection = TrainSection()
    read: ReadConfig = ReadConfig()
    pack: PackConfig = PackConfig(block_size=8, context_length=64)
    cluster: ClusterConfig = ClusterConfig()
    extra: ExtraSection | None = None
    assess: bool = Field(True, description="assess at the end")
    stop: tuple[str, ...] | None = Field(None, description="stop strings")


def configure(*words: str) -> StandInConfig:
    return load_config("stand_in", StandInConfig, parse_arguments(words))


def complaint(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        configure(*words)
    return str(caught.value)


def file_with(folder: Path, text: str) -> str:
    path = folder / "job.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = file_with(tmp_path, "seed: 3\ntrain: {steps: 20, learning_rate: 2e-5}\n")
    config = configure("--config", file, "--train.steps", "30")
    assert (config.seed, config.train.steps, config.train.learning_rate) == (3, 30, 2e-5)
    assert config.train.workers == "auto"


def test_a_list_may_follow_one_key_or_be_spread_over_several() -> None:
    assert configure("--data", "a", "b", "--data=c").data == ("a", "b", "c")


def test_a_file_may_write_a_list_of_one_without_brackets(tmp_path: Path) -> None:
    assert configure("--config", file_with(tmp_path, "data: chats/*.none")).data == (os.path.abspath("chats/*.none"),)


def test_a_single_value_given_twice_keeps_the_last() -> None:
    assert configure("--seed", "1", "--seed", "2").seed == 2


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False)])
def test_booleans_are_written_true_and_false(word: str, value: bool) -> None:
    assert configure("--assess", word).assess is value


def test_other_spellings_of_a_boolean_are_refused() -> None:
    assert complaint("--assess", "maybe") == "assess is 'maybe' (on the command line): it must be true or false."


def test_null_unsets_an_optional_key_and_an_optional_section(tmp_path: Path) -> None:
    file = file_with(tmp_path, "read: {max_rejected: 5}\nextra: {rank: 8}\n")
    assert configure("--config", file).extra == ExtraSection(rank=8)
    config = configure("--config", file, "--read.max_rejected", "null", "--extra", "null")
    assert config.read.max_rejected is None
    assert config.extra is None


def test_a_union_takes_either_of_its_kinds() -> None:
    assert configure("--train.workers", "4").train.workers == 4
    assert configure("--train.workers", "auto").train.workers == "auto"
    message = complaint("--train.workers", "many")
    assert message == "train.workers is 'many' (on the command line): it must be a whole number, or it must be 'auto'."


def test_a_negative_number_is_a_value_and_not_a_key() -> None:
    assert complaint("--seed", "-1") == "seed is -1 (on the command line): it must be at least 0."


def test_a_section_set_in_part_keeps_the_defaults_of_this_job() -> None:
    assert configure("--pack.block_size", "16").pack == PackConfig(block_size=16, context_length=64)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--train.stepz", "did you mean --train.steps?"),
        ("--steps", "did you mean --train.steps?"),
        ("--trian.steps", "did you mean --train.steps?"),
        ("--block_size", "did you mean --pack.block_size?"),
        ("--train.learning-rate", "did you mean --train.learning_rate?"),
        ("--ouput", "did you mean --output?"),
    ],
)
def test_an_unknown_key_on_the_command_line_names_the_nearest(word: str, hint: str) -> None:
    assert complaint(word, "3") == f"{word} is not a key of this job: {hint}"


def test_an_unknown_nested_key_in_a_file_names_file_and_nearest(tmp_path: Path) -> None:
    file = file_with(tmp_path, "train:\n  step: 3\n")
    assert (
        complaint("--config", file)
        == f"The config file {file} has the unknown key train.step: did you mean train.steps?"
    )


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("train: {steps: many}", "train.steps is 'many' (in {file}): it must be a whole number."),
        ("train: {steps: 2.5}", "train.steps is 2.5 (in {file}): it must be a whole number."),
        ("train: {steps: true}", "train.steps is true (in {file}): it must be INT."),
        ("train: {learning_rate: [1]}", "train.learning_rate is [1] (in {file}): it must be a number."),
        ("train: {learning_rate: .inf}", "train.learning_rate is inf (in {file}): it must be a finite number."),
        ("train: 3", "train is 3 (in {file}): it must be a section with keys of its own."),
        ("read: {over_long: cut}", "read.over_long is 'cut' (in {file}): it must be 'split', 'truncate' or 'reject'."),
        ("data: 3", "data is 3 (in {file}): it must be a list."),
        ("model: 7", "model is 7 (in {file}): it must be text."),
        (
            "pack: {context_length: 60}",
            "pack: context_length 60 is not a multiple of block_size 8; the nearest below is 56.",
        ),
    ],
)
def test_a_wrong_value_gets_one_sentence_with_key_value_place_and_rule(tmp_path: Path, text: str, ending: str) -> None:
    file = file_with(tmp_path, text)
    assert complaint("--config", file) == ending.format(file=file)


def test_a_number_that_nothing_can_count_is_refused_and_shown_in_part() -> None:
    assert complaint("--train.steps", "1" + 30 * "0").startswith("train: steps must be at most 9223372036854775807")
    assert len(complaint("--train.steps", "1" + 5000 * "0")) < 300


@pytest.mark.parametrize("key", ["model", "data", "output"])
def test_an_empty_word_is_no_place(key: str) -> None:
    assert complaint(f"--{key}", "").startswith(f"{key} is ") and complaint(f"--{key}", "").endswith(
        " (on the command line): it must not be empty text."
    )


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in complaint("--config", file_with(tmp_path, 3000 * "["))


def test_further_wrong_keys_are_counted() -> None:
    assert complaint("--seed", "x", "--train.steps", "y", "--train.learning_rate", "z").endswith(
        "(2 more keys are wrong.)"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "is not valid YAML: line 1, column"),
        ("seed: 1\nseed: 2", "is not valid YAML: line 2, column 1: the key 'seed' is written twice."),
        ("- 1", "must hold keys and values, not list."),
        ("\tseed: 1", "is not valid YAML: line 1, column 1"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_its_place(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in complaint("--config", file_with(tmp_path, text))


def test_a_missing_file_a_folder_and_bytes_are_refused_by_name(tmp_path: Path) -> None:
    missing, binary = tmp_path / "none.yaml", tmp_path / "bytes.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert complaint("--config", str(missing)) == f"The config file {missing} does not exist."
    assert complaint("--config", str(tmp_path)) == f"The config file {tmp_path} cannot be read: Is a directory."
    assert complaint("--config", str(binary)) == f"The config file {binary} cannot be read: it is not UTF-8 text."


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert configure("--config", file_with(tmp_path, "# nothing\n")) == configure()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("stray",), "'stray' belongs to no key: write --key value, and see --help for the keys."),
        (("--seed",), "--seed needs a value (INT)."),
        (("--train", "3"), "--train is a section: set its keys, such as --train.steps."),
        (("--config", "a", "b"), "--config takes exactly one YAML file."),
        (("--config",), "--config takes exactly one YAML file."),
    ],
)
def test_a_malformed_command_line_gets_one_sentence(words: tuple[str, ...], message: str) -> None:
    assert complaint(*words) == message


def test_the_environment_file_counts_only_without_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_with(tmp_path, "seed: 7\n")
    monkeypatch.setenv("BLOCKCAST_CONFIG", file)
    assert configure().seed == 7
    assert configure("--dry-run").seed == 7
    assert capsys.readouterr().err == ""
    assert configure("--assess", "true").seed == 0
    assert f"BLOCKCAST_CONFIG ({file}) is not read" in capsys.readouterr().err


def test_the_default_output_lies_under_the_storage_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert configure().output == str(tmp_path / "out" / "stand_in" / "results.jsonl")
    monkeypatch.setenv("BLOCKCAST_STORAGE", "s3://bucket/runs/")
    assert configure().output == "s3://bucket/runs/stand_in/results.jsonl"


def test_local_paths_become_absolute_and_ids_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    config = configure("--model", "base", "--data", "*.jsonl", "org/dataset", "s3://b/x", "--output", "here")
    assert config.model == str(tmp_path / "base")
    assert config.data == (str(tmp_path / "*.jsonl"), "org/dataset", "s3://b/x")
    assert config.output == str(tmp_path / "here")


def test_only_keys_that_decide_the_result_enter_the_hash() -> None:
    assert config_hash(configure("--cluster.wait_s", "1", "--output", "x")) == config_hash(configure("--output", "y"))
    assert config_hash(configure("--train.steps", "11")) != config_hash(configure())


def test_a_key_without_a_description_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="needs a description"):
        type("Bare", (Section,), {"__annotations__": {"steps": int}})


def test_help_explains_every_key_with_type_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("stand_in", StandInConfig, dict, argv=["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in list_keys(StandInConfig):
        assert f"--{key.path} {key.type_name}" in text
        assert key.description in text
    assert "--pack.context_length INT tokens in a packed row; a multiple of block_size (default: 64)" in text


def test_a_dry_run_prints_configuration_and_plan_as_yaml_and_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(config: StandInConfig) -> dict:
        raise AssertionError("ran")

    argv = ["--dry-run", "--train.steps", "5"]
    assert main("stand_in", StandInConfig, refuse, lambda config: {"steps": config.train.steps}, argv) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["job"] == "stand_in"
    assert document["config"]["train"] == {"steps": 5, "learning_rate": 1e-4, "workers": "auto"}
    assert document["plan"] == {"steps": 5}
    assert document["config_hash"] == config_hash(configure("--train.steps", "5"))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("The data is empty."), 2, "The data is empty."),
        (JobError("No worker came."), 1, "No worker came."),
        (OSError(28, "No space left on device", "x/y"), 1, "No space left for x/y: free some"),
        (SystemExit(0), 130, "interrupted"),
        (SystemExit(15), 143, "interrupted"),
    ],
)
def test_expected_endings_are_one_line_and_an_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: StandInConfig) -> dict:
        raise error

    assert main("stand_in", StandInConfig, run, argv=["--output", "unused"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        main("stand_in", StandInConfig, lambda config: {"x": 1 / 0}, argv=["--output", "unused"])


@pytest.mark.slow
def test_a_user_error_inside_a_ray_task_is_the_users_one_sentence(
    local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    @ray.remote
    def read() -> None:
        raise UserError("chats.jsonl is empty.")

    assert (
        main("stand_in", StandInConfig, lambda config: {"x": ray.get(read.remote())}, argv=["--output", "unused"]) == 2
    )
    assert capsys.readouterr().err.splitlines()[-1] == "stand_in: chats.jsonl is empty."


def test_the_marked_keys_are_those_that_cannot_change_a_result() -> None:
    assert NOT_IDENTITY == {"identity": False}
    marked = JobConfig.model_fields["output"].json_schema_extra
    assert marked == NOT_IDENTITY


def test_a_recipe_written_for_one_machine_loads_from_another_directory(tmp_path: Path) -> None:
    """The package is installed editable: jobkit imports from anywhere, as workers on other nodes need."""
    code = "import pipelines.jobkit, actors, model; print('ok')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
