"""A folder in the layout of the published checkpoints is a model like any other, in every job.

Tied as the published 1.5B and untied as the 7B. `config.json` knows no mask token: the tokenizer does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.serve_args import ServeArgs
from actors.serving.loaded_model import LoadedModel
from actors.training.rows import RowFormat
from model.backbone import load_backbone
from pipelines.assess import AssessConfig
from pipelines.assess import plan as assess_plan
from pipelines.assess import run as assess_run
from pipelines.chats.vocabulary import row_format
from pipelines.generate import GenerateConfig
from pipelines.generate import run as generate_run
from pipelines.jobkit import main
from tests.packed import counting_rows, write_rows
from tests.published import build_published
from tests.training_runs import adapt, arguments

PROMPT = "t3 t4 t5 t6 t7 t8 t9 t10"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def published(request: pytest.FixtureRequest, golden_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_published(golden_model, tmp_path_factory.mktemp("published") / "model", tied=request.param)


def generate(model: Path, folder: Path) -> list[dict[str, Any]]:
    prompts, output = folder / "prompts.jsonl", folder / f"{model.parent.name}.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT, "max_tokens": 40}) + "\n")
    words = ["--model", str(model), "--prompts", str(prompts), "--output", str(output)]
    assert main("generate", GenerateConfig, generate_run, argv=words) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_it_loads_with_its_own_head_and_the_tokenizers_mask(published: Path) -> None:
    backbone = load_backbone(published)
    assert backbone.block_diffusion is not None
    assert (backbone.block_diffusion.block_size, backbone.block_diffusion.mask_token_id) == (32, 511)
    embedding, head = backbone.model.get_input_embeddings(), backbone.model.get_output_embeddings()
    tied = json.loads((published / "config.json").read_text())["tie_word_embeddings"]
    assert (embedding.weight is head.weight) == tied


def test_prepare_pads_with_the_tokenizers_mask(published: Path) -> None:
    form, _ = row_format(str(published), block_size=32, context_length=64)
    assert form.mask_token_id == 511


def test_generate_answers_in_blocks(published: Path, golden_model: Path, tmp_path: Path) -> None:
    answer = generate(published, tmp_path)[0]
    assert answer["diffusion"]["forwards"]["denoise"] > 0
    if json.loads((published / "config.json").read_text())["tie_word_embeddings"]:
        assert answer["token_ids"] == generate(golden_model, tmp_path)[0]["token_ids"]


@pytest.mark.parametrize("published", [False], ids=["untied"], indirect=True)
def test_assess_measures_it(published: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": PROMPT, "answer": "t11"}) + "\n")
    words = ["--model", str(published), "--prompts", str(questions), "--output", str(tmp_path / "report")]
    code = main("assess", AssessConfig, assess_run, assess_plan, [*words, "--max_tokens", "8"])
    assert code == 0
    assert (tmp_path / "report" / "report.md").is_file()


def test_a_replica_serves_it(published: Path) -> None:
    args = ServeArgs(model=str(published))
    loaded = LoadedModel(args, args.default_model)
    loaded.stop()
    assert loaded.served.card.block_diffusion is not None


@pytest.mark.slow
def test_adapt_goes_on_training_it(local_ray: None, golden_model: Path, tmp_path: Path) -> None:
    """The result is a folder in our layout, with the same mask token."""
    published = build_published(golden_model, tmp_path / "published", tied=False)
    form = RowFormat(block_size=32, context_length=96, mask_token_id=511)
    rows = write_rows(tmp_path / "rows", counting_rows(4, blocks=3, block_size=32, mask_token_id=511), form)
    output = tmp_path / "out"
    run = adapt(arguments(published, rows, output, steps=2, rows_per_step=2), output)
    assert run.code == 0
    result = load_backbone(output / "model")
    assert result.block_diffusion is not None and result.block_diffusion.mask_token_id == 511
    assert result.model.config.model_type == "qwen2"
