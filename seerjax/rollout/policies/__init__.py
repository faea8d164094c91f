"""Scheduling policies, one file each: its settings and its queue of waiting requests."""

from __future__ import annotations

from seerjax.rollout.policies.base import Policy as Policy, Queue as Queue
from seerjax.rollout.policies.context_aware import ContextAware as ContextAware
from seerjax.rollout.policies.divided import Divided as Divided
from seerjax.rollout.policies.group_fcfs import GroupFCFS as GroupFCFS
from seerjax.rollout.policies.longest_group_first import LongestGroupFirst as LongestGroupFirst
from seerjax.rollout.policies.oracle import Oracle as Oracle
from seerjax.rollout.routing import ByPrefix as ByPrefix, ByRoom as ByRoom
