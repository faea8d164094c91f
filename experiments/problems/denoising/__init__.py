"""Single-cell denoising: find the pipeline that predicts molecules which it has not seen.

A cell's molecules were counted gene by gene, and few of them were caught. Each molecule is dealt at
random to one of three parts, so that for one cell and gene

  (train, validation, heldout) ~ Multinomial(count; 0.6, 0.2, 0.2)

and the parts are independent given the cell's true expression. A pipeline sees train alone. With
y the part that judges, x the denoised counts and N(v) = log(1 + 1e4 v / (sum of its cell)):

  MSE      mean of (N(x) - N(y))^2                                     minimised, `Score.value`
  Poisson  mean of z - y log(z + 1e-6),  z = x (total of y / total of train), in nats: at most
           that of the plain start, or the pipeline is no answer

The Poisson number of Open Problems is another function, so theirs and ours do not compare. The MSE
alone can be gamed: y is noisy, N is concave, and so the expression that is least far from
N(y) lies below the true one (of simulated cells, the truth itself is no winner). The second number
holds against that. Published tables ask for 0.97 of the way from train (0) to y (1); how far one
can go depends on the data, so here the bar is what shrinking each cell towards the mean cell gives,
at its best strength; that is also where search starts, since train itself has the likelihood of
one who is sure that what he has not seen is not there.

An artefact is a pipeline: {"steps": [{"op": "log"}, {"op": "svd", "rank": 8}, ...]}. The verifier
runs it on train and recomputes everything; equal pipelines have equal scores. Search reads
validation; `heldout` is for the report, once.

`rules` deals and judges, `datasets` has the counts, `operations` the steps, `smoothing` and
`pipeline` run them, `edits` is the language, `environment` the problem.

Source: Batson, Royer & Webber 2019, molecular cross-validation, https://doi.org/10.1101/786269;
Open Problems in Single-Cell Analysis, denoising, https://openproblems.bio; van Dijk et al. 2018
(MAGIC), https://doi.org/10.1016/j.cell.2018.05.061; Linderman et al. 2022 (ALRA),
https://doi.org/10.1038/s41467-021-27729-z; TTT-Discover, https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from experiments.problems.denoising.environment import Denoising

__all__ = ["Denoising"]
