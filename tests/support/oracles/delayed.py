"""Delayed scaling written out: two dense layers, their gradients and their histories, in numpy.

Sums are float64; only the quotient that is rounded to a code is float32, as any implementation of
fp8 has it.
"""

import ml_dtypes
import numpy as np

E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)
SITES = ("a:dot_general0", "b:dot_general0")
SIDES = ("lhs", "rhs", "grad")


def empty(length):
    return {site: {side: np.zeros(length) for side in SIDES} for site in SITES}


def rounded(x, history, form):
    """What the codes of x stand for, and which of its values were inside the range."""
    dtype, bound = form
    largest = history.max() or np.abs(x).max()
    scale = np.float32(np.float32(largest) / np.float32(bound))
    units = np.clip(x.astype(np.float32) / scale, -bound, bound)
    inside = np.abs(x) <= float(scale) * bound * (1 + 1e-6)
    return units.astype(dtype).astype(np.float64) * float(scale), inside


def pushed(history, x):
    return np.concatenate([[np.abs(x).max()], history[:-1]])


def step(params, histories, x, y):
    """Loss, gradients and histories of mean((tanh(x @ a) @ b - y)^2)."""
    a, b = (np.asarray(params[k], np.float64) for k in "ab")
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    first, second = (histories[site] for site in SITES)
    qx, _ = rounded(x, first["lhs"], E4M3)
    qa, a_inside = rounded(a, first["rhs"], E4M3)
    hidden = np.tanh(qx @ qa)
    qh, h_inside = rounded(hidden, second["lhs"], E4M3)
    qb, b_inside = rounded(b, second["rhs"], E4M3)
    out = qh @ qb
    g = 2 * (out - y) / out.size
    qg, _ = rounded(g, second["grad"], E5M2)
    db = (qh.T @ qg) * b_inside
    g_hidden = (qg @ qb.T) * h_inside * (1 - hidden**2)
    qg_hidden, _ = rounded(g_hidden, first["grad"], E5M2)
    da = (qx.T @ qg_hidden) * a_inside
    values = {SITES[0]: (x, a, g_hidden), SITES[1]: (hidden, b, g)}
    new = {
        site: {side: pushed(histories[site][side], v) for side, v in zip(SIDES, vs, strict=True)}
        for site, vs in values.items()
    }
    return np.mean((out - y) ** 2), {"a": da, "b": db}, new
