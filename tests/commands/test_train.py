"""The command `train`: its outputs at a size of seconds, and errors before the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from seerjax import metrics, numerics as numerics_lib
from seerjax.commands import export, train
from seerjax.models import config as model_config, huggingface, peft
from seerjax.run import presets as run_presets
from seerjax.trainer import losses

ROOT = pathlib.Path(__file__).parents[2]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "seerjax.commands", "train", *arguments],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    check=False,
  )


def test_a_small_run_of_the_command_with_adapters(tiny: str, tmp_path: pathlib.Path):
  done = command(
    f"--config.model={tiny}",
    f"--workdir={tmp_path / 'run'}",
    "--config.num_steps=1",
    "--config.lora_rank=4",
    "--config.rollout.prompts_per_step=1",
    "--config.rollout.group_size=2",
    "--config.rollout.max_tokens=4",
    "--config.evaluation.num_problems=2",
    "--config.engine.max_num_seqs=4",
    "--config.engine.batch_size_buckets=(64,)",
    "--config.trainer.rows_per_micro_batch=512",
  )
  assert done.returncode == 0, done.stderr
  assert "max_abs_logprob_gap      0.0" in done.stdout
  assert "held-out accuracy on 2 problems, before:" in done.stdout
  assert "steps of the engine" in done.stdout
  # At the end: a problem, the outputs, and next commands; all but the first are run here.
  end = done.stdout.partition("one held-out problem, the first: ")[2]
  assert "\n  before (" in end and "\n  after (" in end and "\nreport   " in end
  *_, generate, replay, more = end.splitlines()
  assert f"bash launch/local.sh generate --model={tmp_path / 'run' / 'model'} --prompt=" in generate
  assert f"bash launch/local.sh replay --run={tmp_path / 'run'} --request=0/0/0" in replay
  assert more.endswith("--config.trainer.rows_per_micro_batch=512 --resume --config.num_steps=2")
  assert "step 0 " not in done.stdout  # Evaluations have no line of their own in the table.
  status = json.loads((tmp_path / "run" / "status.json").read_text())
  assert (status["state"], status["step"]) == ("finished", 1)
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["optimizer_steps"] == 1 and summary["kl_max"] == 0.0
  # Settings left to the model are recorded with their chosen values.
  settings = json.loads((tmp_path / "run" / "config.json").read_text())
  assert settings["numerics"]["reduction_shards"] == 2
  assert settings["fingerprint"]["reduction_shards"] == "2"
  assert (tmp_path / "run" / "report.html").stat().st_size > 1000
  # Any saved step can be exported by a separate command, and its adapters alone.
  run = tmp_path / "run"
  assert export.export(run, None, export.Target(tmp_path / "last"))[0] == 1
  for file in ("model.safetensors", "config.json", "tokenizer.json"):
    assert (tmp_path / "last" / file).read_bytes() == (run / "model" / file).read_bytes()
  assert export.export(run, 0, export.Target(tmp_path / "adapter"), is_adapter=True)[0] == 0
  first, scale = peft.load(tmp_path / "adapter", *settled(tiny))
  assert scale == 4.0 and all(not pair["b"].any() for pair in first["layers"][0].values())
  with pytest.raises(ValueError, match=r"got step 7 of .*, expected one of \(0, 1\)"):
    export.export(run, 7, export.Target(tmp_path / "seventh"))
  # The export is a plain model with merged adapters.
  params, model = huggingface.load(tmp_path / "run" / "model", run_presets.main_job().numerics)
  assert model.num_layers == len(params["layers"]) == 2
  assert set(params["layers"][0]) == set(
    huggingface.load(tiny, run_presets.main_job().numerics)[0]["layers"][0]
  )


def settled(model: str) -> tuple[model_config.TransformerConfig, numerics_lib.NumericsConfig]:
  return huggingface.load_config(model), run_presets.main_job().numerics


def test_a_run_without_adapters_or_of_discovery_is_refused(tmp_path: pathlib.Path):
  config = metrics.encode(dataclasses.asdict(run_presets.main_job()))
  metrics.write_summary(tmp_path / "config.json", config)
  with pytest.raises(ValueError, match="--adapter: got .*, which trained all weights"):
    export.export(tmp_path, None, export.Target(tmp_path / "out"), is_adapter=True)
  metrics.write_summary(tmp_path / "config.json", {"problem": "denoising"})
  with pytest.raises(ValueError, match="a run of discovery, expected one of `train`"):
    export.export(tmp_path, None, export.Target(tmp_path / "out"))


def test_what_was_saved_is_the_sum_of_all_steps():
  rows = [
    {"step": 0, "heldout/accuracy": 0.5},
    {"schedule/steps": 1200.0, "schedule/tail_steps": 30.0, "schedule/accepted_tokens": 400.0,
     "schedule/drafted_tokens": 900.0, "schedule/migrations": 2.0, "schedule/spills": 1.0},
    {"schedule/steps": 300.0, "schedule/tail_steps": 12.0, "schedule/accepted_tokens": 100.0,
     "schedule/drafted_tokens": 200.0, "schedule/migrations": 0.0, "schedule/spills": 0.0},
  ]  # fmt: skip
  text = train.saved(rows)
  assert text.startswith("1,500 steps of the engine, 42 of them for the last tenth")
  assert "500 tokens came from drafts and needed no separate step (1,100 drafted)" in text
  assert "2 requests moved to another instance with their KV pages, 1 to the host" in text


@pytest.mark.parametrize(
  "added, script",
  [
    ((), "local.sh"),
    (
      ("--num_processes=2", "--coordinator=127.0.0.1:123", "--process_id=0"),
      "processes.sh --num_processes=2",
    ),
    (
      ("--config.cluster.workers=3", "--config.cluster.address=127.0.0.1:123",
       "--config.kv_pool.mooncake=127.0.0.1:4", "--config.kv_pool.store_bytes=9"),
      "cluster.sh --workers=3",
    ),
  ],
)  # fmt: skip
def test_what_to_try_next_begins_with_the_script_that_began_the_run(added, script):
  config = run_presets.main_job()
  arguments = ("--workdir=a run", "--resume", "--config.num_steps=3", *added)
  found = train.next_commands(config, pathlib.Path("a run"), arguments).splitlines()
  assert found[-1] == (
    f"  bash launch/{script} train '--workdir=a run' --resume"
    f" --config.num_steps={2 * config.num_steps}"
  )


@pytest.mark.parametrize(
  ("loss", "message"),
  [
    ("nowhere:f", "--loss: got 'nowhere:f', but module 'nowhere' cannot be imported"),
    ("seerjax.trainer.losses:grop", "--loss: got .*, but 'seerjax.trainer.losses' has no 'grop'"),
    ("seerjax.types:__name__", "--loss: got 'seerjax.types:__name__', a str, expected a function"),
  ],
)
def test_a_loss_that_is_no_function_is_refused(loss, message):
  with pytest.raises(ValueError, match=message):
    train.parts_of(loss, "")
  with pytest.raises(ValueError, match=message.replace("--loss", "--advantages")):
    train.parts_of("", loss)


def test_parts_of_ones_own_are_imported():
  assert train.parts_of("", "") == train.Parts(None, None)
  found = train.parts_of("seerjax.trainer.losses:policy_loss", "")
  assert found == train.Parts(losses.policy_loss, None)


@pytest.mark.parametrize("texts", [["a"], ["-1"], ["0", "0"], ["1.5"], [""]])
def test_seeds_are_different_numbers(texts):
  assert train.seeds_of(["0", "2", "10"]) == (0, 2, 10) and train.seeds_of([]) == ()
  with pytest.raises(ValueError, match="--seeds: got .*, expected different whole numbers; write"):
    train.seeds_of(texts)


@pytest.mark.long
def test_seeds_and_parts_of_ones_own_by_command(tiny: str, tmp_path: pathlib.Path):
  (tmp_path / "mine.py").write_text(
    "from seerjax.trainer import losses\n"
    "def loss(*rows, **more):\n  return losses.policy_loss(*rows, **more)\n"
    "def advantages(rewards):\n  return rewards - rewards.mean(axis=1, keepdims=True)\n"
  )
  more = ("--loss=mine:loss", "--advantages=mine:advantages")
  first = command(
    f"--config.model={tiny}", f"--workdir={tmp_path / 'both'}", "--seeds=0,1", *more,
    "--config.num_steps=1", "--config.rollout.prompts_per_step=2", "--config.rollout.group_size=4",
    "--config.rollout.max_tokens=4", "--config.evaluation.num_problems=2",
    "--config.engine.max_num_seqs=4", "--config.engine.batch_size_buckets=(64,)",
    "--config.trainer.rows_per_micro_batch=512", PYTHONPATH=str(tmp_path),
  )  # fmt: skip
  assert first.returncode == 0, first.stderr
  *_, table = first.stdout.partition("\n" + " " * 20)
  assert "seed_0" in table and "seed_1" in table and "largest KL, nats" in table
  assert (tmp_path / "both" / "comparison.html").stat().st_size > 1000
  runs = [tmp_path / "both" / f"seed_{seed}" for seed in (0, 1)]
  assert [json.loads((run / "config.json").read_text())["seed"] for run in runs] == [0, 1]
  # A stored configuration runs again, to the same weights.
  again = command(
    f"--config_file={runs[1] / 'config.json'}", f"--workdir={tmp_path / 'again'}", *more,
    PYTHONPATH=str(tmp_path),
  )  # fmt: skip
  assert again.returncode == 0, again.stderr
  weights = [run / "model" / "model.safetensors" for run in (*runs, tmp_path / "again")]
  digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]
  assert digests[1] == digests[2] and digests[0] != digests[1]


def test_a_misspelt_flag_is_refused_with_the_nearest_name():
  done = command("--config.optimizer.learning_rat=1")
  assert done.returncode == 2
  assert done.stderr.startswith("--config.optimizer.learning_rat: got 'learning_rat', expected one")
  assert "did you mean 'learning_rate'?" in done.stderr


def test_help_says_what_it_is_and_what_it_takes():
  done = command("--help")
  assert done.returncode == 0
  assert done.stdout.startswith("Trains a model on a task")
  assert "--workdir=runs/grpo" in done.stdout and "--[no]resume" in done.stdout


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      dict(task="gsm8k"),
      "gsm8k: got no path, expected the original JSON lines; set --config",
    ),
    (
      dict(task="words"),
      "tasks.load: got name 'words', expected 'code', 'math', 'countdown', 'gsm8k'",
    ),
    (
      dict(model="/nowhere"),
      "resolve: got '/nowhere', which is not a directory, expected a mod",
    ),
  ],
)
def test_what_is_not_there_is_refused(changes, message, tmp_path):
  config = dataclasses.replace(run_presets.main_job(), **changes)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    train.prepare(config, tmp_path / "run", resume=False, bitwise=True)
  assert not (tmp_path / "run").exists()


def test_there_must_be_something_to_resume(tmp_path):
  with pytest.raises(ValueError, match=r"got no checkpoint to resume, expected one under"):
    train.prepare(run_presets.main_job(), tmp_path, resume=True, bitwise=True)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      dict(rollout=dataclasses.replace(run_presets.main_job().rollout, max_tokens=400)),
      r"word_problems: got a prompt of \d+ tokens \(problem 'word_problems-heldout-.*' of split"
      r" 'heldout'\) and max_tokens 400, expected a sum of at most 512"
      r" \(EngineConfig.max_model_len",
    ),
    (
      dict(
        rollout=dataclasses.replace(run_presets.main_job().rollout, max_tokens=1000),
        engine=dataclasses.replace(run_presets.main_job().engine, max_model_len=2048),
      ),
      r"expected a sum of at most 1024 \(the model's max_model_len\); raise it, or lower Rollout",
    ),
    (
      dict(trainer=dataclasses.replace(run_presets.main_job().trainer, rows_per_micro_batch=256)),
      r"of split 'train'\) and max_tokens 216, expected a sum of at most 257 \(TrainerConfig.rows",
    ),
  ],
)
def test_prompts_without_room_for_an_answer_are_refused_beforehand(changes, message, tmp_path):
  job = run_presets.main_job()
  evaluation = dataclasses.replace(job.evaluation, num_problems=200)
  config = dataclasses.replace(job, evaluation=evaluation, num_steps=4, **changes)
  with pytest.raises(ValueError, match=message):
    train.prepare(config, tmp_path / "run", resume=False, bitwise=True)
  assert not (tmp_path / "run").exists()
