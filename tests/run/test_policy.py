"""A policy's chat settings, and the weights that it exports."""

from __future__ import annotations

import dataclasses

import pytest
from small_run import CONFIG, policy

from seerjax.models import chat_template
from seerjax.run import policy as policy_lib

LOADED, GIVEN = "2026-11-27T12:00:00+01:00", "2027-01-02T03:04:05+00:00"
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


@pytest.mark.parametrize(
  ("own", "given", "now"),
  [
    (LOADED, "", LOADED),
    (LOADED, GIVEN, GIVEN),  # A setting wins.
    ("", GIVEN, GIVEN),
    (GIVEN, GIVEN, GIVEN),
  ],
)
def test_a_template_that_reads_the_clock_has_one_moment(own: str, given: str, now: str):
  tokenizer = dataclasses.replace(
    policy().require_tokenizer(),
    chat_template="{{ strftime_now('%F') }}",
    chat_config=chat_template.ChatConfig(now=own),
  )
  found = policy_lib.chatting(tokenizer, chat_template.ChatConfig(system="Hi.", now=given))
  assert found.chat_config == chat_template.ChatConfig(system="Hi.", now=now)
  assert found.chat("a") == now[:10]
  assert policy_lib.chatting(found, found.chat_config) == found
  # A hand-made policy gets the moment at which a run starts with it.
  bare = dataclasses.replace(tokenizer, chat_config=chat_template.ChatConfig())
  assert policy_lib.chatting(bare, chat_template.ChatConfig()).chat_config.now


def test_a_moment_that_no_template_reads_is_refused():
  config = chat_template.ChatConfig(now=GIVEN)
  message = "ChatConfig.now: got .* and a chat template that does not read the clock .*leave it out"
  with pytest.raises(ValueError, match=message):
    policy_lib.chatting(policy().require_tokenizer(), config)


@pytest.mark.thorough
def test_full_fine_tuning_exports_its_masters(whole):
  state = whole[1].state
  assert policy_lib.exported_weights(CONFIG.weights, policy(), state.params) is state.params
