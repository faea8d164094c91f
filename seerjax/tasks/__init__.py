"""Where problems come from and what a good answer is."""

from seerjax.tasks.base import Draws, FunctionTask, function_task, load
from seerjax.tasks.countdown import Countdown, CountdownConfig
from seerjax.tasks.gsm8k import Gsm8k
from seerjax.tasks.word_problems import WordProblems, WordProblemsConfig

__all__ = [
  "Countdown",
  "CountdownConfig",
  "Draws",
  "FunctionTask",
  "Gsm8k",
  "WordProblems",
  "WordProblemsConfig",
  "function_task",
  "load",
]
