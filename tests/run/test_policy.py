"""A policy's chat, and the weights that it exports."""

from __future__ import annotations

import dataclasses

import pytest
from small_run import CONFIG, policy

from seerjax.models import chat_template
from seerjax.run import policy as policy_lib

pytestmark = pytest.mark.usefixtures("programs_on_disk")


def test_a_tokenizer_that_says_other_things_is_refused():
  own = dataclasses.replace(
    policy().require_tokenizer(), chat_config=chat_template.ChatConfig(system="Ho.")
  )
  message = "RunConfig.chat: got .*'Hi.'.* and a tokenizer with .*'Ho.'.*; set --config.chat alone"
  with pytest.raises(ValueError, match=message):
    policy_lib.chatting(own, chat_template.ChatConfig(system="Hi."))
  with pytest.raises(ValueError, match="RunConfig.chat"):
    policy_lib.chatting(own, chat_template.ChatConfig())
  assert policy_lib.chatting(own, own.chat_config) == own


@pytest.mark.thorough
def test_full_fine_tuning_exports_its_masters(whole):
  state = whole[1].state
  assert policy_lib.exported_weights(CONFIG.weights, policy(), state.params) is state.params
