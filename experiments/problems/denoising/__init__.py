"""Single-cell denoising: find a pipeline that predicts unseen molecules.

A cell's molecules were counted by gene, and only few of them were captured. Each molecule is
assigned at random to one of three parts, so that for one cell and gene

  (train, validation, heldout) ~ Multinomial(count; 0.6, 0.2, 0.2)

and the parts are independent given the cell's true expression. A pipeline sees only train. With y
the judging part, x the denoised counts and N(v) = log(1 + 1e4 v / (sum of the cell)):

  MSE      mean of (N(x) - N(y))^2                                     minimised, `Score.value`
  Poisson  mean of z - y log(z + 1e-6),  z = x (total of y / total of train), in nats: at most
           that of the plain start, otherwise the pipeline is invalid

The Poisson number of Open Problems is a different function and not comparable with ours. The MSE
alone can be gamed: y is noisy and N is concave, so the expression with the least distance to N(y)
lies below the true one (for simulated cells, the truth does not win). The second number prevents
that. Published tables require 0.97 of the way from train (0) to y (1). The achievable share depends
on the data, so here the limit is that of shrinking each cell towards the mean cell with the best
strength. That is also the start of search, because train itself assigns probability zero to unseen
molecules.

An artefact is a pipeline: {"steps": [{"op": "log"}, {"op": "svd", "rank": 8}, ...]}. The verifier
runs it on train and recomputes everything; equal pipelines have equal scores. Search uses
validation; `heldout` is only for the report.

`rules` splits and judges, `datasets` has the counts, `operations` the steps, `smoothing` and
`pipeline` run them, `edits` is the language, `environment` the problem.

Source: Batson, Royer & Webber 2019, molecular cross-validation, https://doi.org/10.1101/786269;
Open Problems in Single-Cell Analysis, denoising, https://openproblems.bio; van Dijk et al. 2018
(MAGIC), https://doi.org/10.1016/j.cell.2018.05.061; Linderman et al. 2022 (ALRA),
https://doi.org/10.1038/s41467-021-27729-z; TTT-Discover, https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from experiments.problems.denoising.environment import Denoising

__all__ = ["Denoising"]
