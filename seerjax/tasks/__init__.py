"""Tasks: sources of problems with their verdicts."""

from seerjax.tasks.countdown import Countdown
from seerjax.tasks.draws import Draws
from seerjax.tasks.function_task import FunctionTask, function_task
from seerjax.tasks.gsm8k import Gsm8k
from seerjax.tasks.loading import load
from seerjax.tasks.word_problems import WordProblems, WordProblemsConfig

__all__ = [
  "Countdown",
  "Draws",
  "FunctionTask",
  "Gsm8k",
  "WordProblems",
  "WordProblemsConfig",
  "function_task",
  "load",
]
