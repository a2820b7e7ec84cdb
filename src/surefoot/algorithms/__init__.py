"""The mathematics of the objective: tensors in, tensors out.

Every column is flat over *model tokens*, the tokens that the policy chose: prompt and tool tokens never appear, and
there is no padding. Suffixes give the shape: `_T` is one entry per model token, `_S` one per row of a micro-batch,
`_R` one per rollout of a step; `cu_seqlens [S+1]` (int64) holds the rows' bounds in `[T]`, so that row s is
`x_T[cu_seqlens[s]:cu_seqlens[s + 1]]`. Rows without model tokens are not expected; where one occurs it carries
weight 0.

A new estimator or loss is one function (here), one row of a table (`table.py`) and one test.
"""
