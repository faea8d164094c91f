"""The nano model's tokenizer and pretraining text.

Claim: none; used by `learning/pretrain_nano.py`. Run as a program it trains a tokenizer like
nano's and prints token lengths of the main task:
  python -m experiments.learning.nano_corpus --workdir=runs/tokenizer
CPU, about 20 seconds. (The shipped tokenizer is older than the current templates; it is kept
because weights and tokenizer belong together.)
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import pathlib

from absl import flags
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from experiments import measure
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.tasks import countdown, word_problems
from seerjax.tasks.draws import Draws

COUNTDOWN_RATE = 0.15
BRIEF_RATE = 0.25
LARGE_RATE = 0.3
LARGE = word_problems.WordProblemsConfig(max_operand=99, max_total=400)
VOCAB_SIZE = 512  # All ids are used: there is no padding id that a model could sample.
TRAINING_DOCUMENTS = 20_000
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# A word or a run of symbols with the preceding space, one digit, or white space.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"

CHAT_TEMPLATE = (
  "{% for message in messages %}"
  "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def documents(
  seed: int,
  *,
  countdown_rate: float = COUNTDOWN_RATE,
  brief_rate: float = BRIEF_RATE,
  large_rate: float = LARGE_RATE,
) -> Iterator[tuple[str, str]]:
  """Yields (prompt, solution) without end; equal seeds give equal texts.

  A training document is `chat(prompt) + solution + "<|im_end|>"`. Problems come from the tasks'
  "pretrain" splits, which are used nowhere else. A share `large_rate` of the word problems has
  operands up to 99, so that every digit occurs at every place; reinforcement learning trains on
  operands up to 40, and held-out problems have larger ones. A share `brief_rate` of the word
  problems is answered with the last line only, so that the model knows both ways and reinforcement
  learning can choose the better one.
  """
  draws = Draws("nano_corpus", seed)
  words = word_problems.WordProblems()
  large = word_problems.WordProblems(config=LARGE)
  numbers = countdown.Countdown()
  while True:
    if draws.chance(countdown_rate):
      task = numbers
    else:
      task = large if large_rate and draws.chance(large_rate) else words
    problem = task.problem("pretrain", draws.below(task.num_problems("pretrain")))
    is_brief = task is not numbers and draws.chance(brief_rate)
    yield problem.prompt, problem.solution.split("\n")[-1] if is_brief else problem.solution


def train_tokenizer(
  directory: str | pathlib.Path, *, seed: int = 0, num_documents: int = TRAINING_DOCUMENTS
) -> tokenizer_lib.Tokenizer:
  """Trains nano's byte-level BPE, writes its two files and returns the tokenizer read from them."""
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB_SIZE,
    special_tokens=[PAD, START, END],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )

  def texts() -> Iterator[str]:
    for index, (prompt, solution) in enumerate(documents(seed)):
      if index == num_documents:
        return
      # Includes the template's roles, so that each becomes one token.
      yield f"user\n{prompt}"
      yield f"assistant\n{solution}"

  backend.train_from_iterator(texts(), trainer)
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  backend.save(str(directory / "tokenizer.json"))
  config = dict(
    tokenizer_class="PreTrainedTokenizerFast",
    bos_token=None,
    eos_token=END,
    pad_token=PAD,
    unk_token=None,
    clean_up_tokenization_spaces=False,
    model_max_length=1024,
    chat_template=CHAT_TEMPLATE,
  )
  (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
  return tokenizer_lib.load(directory)


def lengths(
  tokenizer: tokenizer_lib.Tokenizer, split: str, count: int = 3000
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (prompt, solution) lengths, i64[count] each, in tokens with chat and end tokens."""
  task = word_problems.WordProblems()
  stride = task.num_problems(split) // count
  problems = [task.problem(split, index * stride) for index in range(count)]
  prompts = [len(tokenizer.chat_ids(p.prompt)) for p in problems]
  solutions = [len(tokenizer.encode(p.solution)) + 1 for p in problems]
  return np.asarray(prompts), np.asarray(solutions)


def main(args: flags.FlagValues) -> None:
  tokenizer = train_tokenizer(args.workdir)
  print(f"{tokenizer.vocab_size} tokens in {args.workdir}")
  for split in ("train", "heldout"):
    for name, values in zip(("prompt", "solution"), lengths(tokenizer, split), strict=True):
      print(
        f"{split:8s} {name:9s} mean {values.mean():6.1f}  median {np.median(values):5.0f}"
        f"  p99 {np.quantile(values, 0.99):5.0f}  max {values.max():4d}"
      )


if __name__ == "__main__":
  flags.DEFINE_string("workdir", "runs/tokenizer", "Output directory for the tokenizer.")
  measure.command(main)
