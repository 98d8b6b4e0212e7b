"""The squared-hinge problem in rational numbers: the proof that an active set is the right one, without a rounding."""

from fractions import Fraction


def solve(matrix, rhs):
    """Gaussian elimination in fractions."""
    n = len(matrix)
    rows = [[*row, value] for row, value in zip(matrix, rhs, strict=True)]
    for i in range(n):
        pivot = next(r for r in range(i, n) if rows[r][i] != 0)
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(n):
            if r != i and rows[r][i] != 0:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] for i in range(n)]


def ridge(x, signs, weights, rho, intercept, active):
    """Exact w and b of ridge regression on the active samples. x: lists of integers or fractions; rho: one, or by column."""
    J, constant = len(x[0]), intercept != "none"
    D = J + constant
    matrix = [[Fraction(0)] * D for _ in range(D)]
    rhs = [Fraction(0)] * D
    for row, sign, weight, on in zip(x, signs, weights, active, strict=True):
        if not on:
            continue
        v = [Fraction(a) for a in row] + [Fraction(1)] * constant
        for i in range(D):
            rhs[i] += Fraction(weight) * sign * v[i]
            for j in range(D):
                matrix[i][j] += Fraction(weight) * v[i] * v[j]
    for i in range(J + (intercept == "penalized")):
        matrix[i][i] += Fraction(rho[i] if isinstance(rho, list) else rho)
    w = solve(matrix, rhs)
    return (w[:J], w[J]) if constant else (w, Fraction(0))


def margins(x, signs, w, b):
    """Exact margins."""
    return [
        s * (sum(Fraction(a) * v for a, v in zip(row, w, strict=True)) + b) for row, s in zip(x, signs, strict=True)
    ]


def standardised(x, copies, rho):
    """Rows about their mean, rho times the variance of each column (1 for a constant one) and rho, and the mean."""
    n = sum(copies)
    mean = [Fraction(sum(c * Fraction(row[j]) for row, c in zip(x, copies, strict=True)), n) for j in range(len(x[0]))]
    rows = [[Fraction(a) - m for a, m in zip(row, mean, strict=True)] for row in x]
    squares = [sum(c * row[j] ** 2 for row, c in zip(rows, copies, strict=True)) / n for j in range(len(mean))]
    return rows, [Fraction(rho) * (s or 1) for s in squares] + [Fraction(rho)], mean


def check_active_set(x, signs, weights, rho, intercept, active):
    """Assert that the set is that of the minimum, and return the exact weights, intercept and number of margins equal to 1."""
    w, b = ridge(x, signs, weights, rho, intercept, active)
    found = margins(x, signs, w, b)
    assert [m < 1 for m in found] == list(active), [float(m - 1) for m in found]
    return w, b, sum(m == 1 for m in found)
