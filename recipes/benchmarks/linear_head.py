"""Measure the speed of the linear head as ratios to bare float64 products of the same shapes, from one run.

    python recipes/benchmarks/linear_head.py                  # every table, about four minutes on two cores
    python recipes/benchmarks/linear_head.py --only bulk      # bulk | rows | single | block | solve | crossover
    python recipes/benchmarks/linear_head.py --only groups    # 20 layers of 4,096 and 10,000 columns: minutes, so by name only
    python recipes/benchmarks/linear_head.py --threads 1

The two sides of each line alternate, and the line gives the ratio of their medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from torchlssvm import CompactLSSVMHead, LSSVMHead
from torchlssvm.functional import cost
from torchlssvm.functional.group_elimination import eliminate


def seconds(job: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def compare(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each job. The jobs take turns."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            times[name].append(seconds(job))
    return {name: statistics.median(t) for name, t in times.items()}


def data(n: int, J: int, K: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Features with the distribution of a ReLU network's output, and labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, J, generator=generator).relu_(), torch.randint(K, (n,), generator=generator)


def gemm_rate(J: int) -> Callable[[], object]:
    """The rate of a square float64 product (2 J^3 flops)."""
    a = torch.randn(J, J, dtype=torch.float64)
    return lambda: a @ a


def bulk(rounds: int) -> None:
    """Compare adding 8,192 rows (checks, rounding, fingerprints, integer sums) with the bare product q^T q."""
    print("\nBulk adding, 8,192 rows, 10 classes: time / time of q.T @ q           (target: <= 0.75)")
    for J in (512, 1024, 2048):
        x, y = data(8192, J)
        head = LSSVMHead(J, 10, rho=1.0).add(x, y)
        assert head.grid is not None
        q = head.grid.quantize(x)
        t = compare({"gemm": lambda q=q: q.mT @ q, "add": lambda h=head, x=x, y=y: h.add(x, y)}, rounds)
        print(
            f"  J={J:5d}   q.T @ q {t['gemm'] * 1e3:7.1f} ms   add {t['add'] * 1e3:7.1f} ms   ratio {t['add'] / t['gemm']:.2f}"
        )


def rows(rounds: int) -> None:
    """Compare single removals from a million rows with those from ten thousand. No removal reads all rows."""
    print("\nSingle removals, J=16, 10 classes          (target beside 1,000,000 rows: first <= 50 ms, later <= 1 ms)")
    for n in (10_000, 1_000_000):
        x, y = data(n, 16)
        head = LSSVMHead(16, 10, grid=16.0, rho=1.0)
        start = time.perf_counter()
        for i in range(0, n, 50_000):
            head.add(x[i : i + 50_000], y[i : i + 50_000])
        adding, times = time.perf_counter() - start, []
        for i in range(20 * rounds):
            start = time.perf_counter()
            head.remove(x[i : i + 1], y[i : i + 1])
            times.append(time.perf_counter() - start)
        print(
            f"  {n:9,d} rows added in {adding:5.2f} s   first removal {times[0] * 1e3:6.2f} ms   later "
            f"{statistics.median(times[1:]) * 1e3:6.3f} ms"
        )


def single(rounds: int) -> None:
    """Remove one sample and read w, compared with the three passes over P of an immediate update."""
    print("\nOne sample removed and w read, 200 times, K=10: mean / three passes over P   (target at J=2048: <= 1.25)")
    for J in (1024, 2048):
        x, y = data(4 * J, J)
        head = LSSVMHead(J, 10, rho=1.0).add(x, y)
        P, v = torch.randn(J, J, dtype=torch.float64), torch.randn(J, 1, dtype=torch.float64)

        def eager(P: torch.Tensor = P, v: torch.Tensor = v) -> None:
            u = P @ v
            P.addcmul_(u, u.mT, value=-1e-9)

        def removal(i: int, head: LSSVMHead = head, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            head.remove(x[i : i + 1], y[i : i + 1])
            head.w  # noqa: B018

        ratios = []
        _ = head.w
        for start in range(0, 200 * min(rounds, 3), 200):  # blocks of 20 in turns; solves fall where they fall
            ours = passes = 0.0
            for block in range(start, start + 200, 20):
                ours += sum(seconds(lambda i=i: removal(i)) for i in range(block, block + 20))
                passes += sum(seconds(eager) for _ in range(20))
            ratios.append((ours / passes, ours / 200, passes / 200))
        ratio, ours, passes = sorted(ratios)[len(ratios) // 2]
        print(f"  J={J:5d}   three passes {passes * 1e3:6.2f} ms   remove + w {ours * 1e3:6.2f} ms   ratio {ratio:.2f}")


def block(rounds: int) -> None:
    """Change 64 samples at once. Theorem 1 takes 4 J^2 L flops; print the rate as a share of a matrix product's rate."""
    print(
        "\n64 samples, share of the rate of a square product over 4 J^2 L flops   (target, J >= 1024: P >= 0.75, w only > 1)"
    )
    for J in (512, 1024, 2048):
        cells = [
            f"{'statistics' if form else 'compact'}, {what} read: {_share(J, form, what, rounds):.2f}"
            for form in (True, False)
            for what in ("P", "w")
        ]
        print(f"  J={J:5d}   " + "   ".join(cells))


def _share(J: int, form: bool, what: str, rounds: int) -> float:
    x, y = data(4 * J, J)
    head = (LSSVMHead(J, 10, rho=1.0) if form else CompactLSSVMHead(J, 10)).add(x, y)
    gemm = gemm_rate(J)
    times, rates = [], []
    # From a solved state each round: what is timed is the update, not the solve that the rule puts in now and then. With P
    # read, that comes after 8 J columns, so the rounds are longer; the first update of a round warms the caches up.
    count = 8 if what == "P" or not form else 2
    for _ in range(rounds):
        if form:
            head.refresh()
        _ = head.P if what == "P" or not form else head.w
        rates.append(seconds(gemm) / (2 * J**3))
        _ = getattr(head, what)
        for start in range(0, 64 * count, 64):

            def job(rows: slice = slice(start, start + 64)) -> None:
                head.remove(x[rows], y[rows])
                _ = getattr(head, what)

            times.append(seconds(job))
        head.add(x[: 64 * count], y[: 64 * count])
    return statistics.median(rates) * 4 * J * J * 64 / statistics.median(times)


def solve(rounds: int) -> None:
    """Solve for w from statistics, compared with J^3 / 3 flops at the rate of a square product."""
    print("\nSolving w from statistics: time / time of J^3/3 flops at the product's rate   (target, J >= 1024: <= 2.2)")
    for J in (512, 784, 1024, 2048):
        x, y = data(2 * J, J)
        head = LSSVMHead(J, 10, rho=1.0).add(x, y)
        head.digest()  # everything is summed: what is timed is the solve
        t = compare({"gemm": gemm_rate(J), "solve": head.refresh}, 3 * rounds)
        base = t["gemm"] / 6
        print(
            f"  J={J:5d}   J^3/3 {base * 1e3:6.2f} ms   solve {t['solve'] * 1e3:6.2f} ms   ratio {t['solve'] / base:.2f}"
        )


def crossover(rounds: int) -> None:
    """Compare Theorem 1 for L changed samples with one solve. The library solves for more than J/6."""
    print("\nTheorem 1 on L columns / one solve from statistics (w only); the rule solves past L = J/6")
    for J in (512, 1024, 2048):
        x, y = data(3 * J, J)
        cells = []
        for share in (16, 8, 6, 4, 2):
            L = J // share
            rule = "solve" if cost.solve_is_cheaper(J, L, L, inverse=False) else "update"
            update, again = [], []
            for _ in range(rounds):
                head = LSSVMHead(J, 10, rho=1.0).add(x, y)
                head.digest()
                again.append(seconds(head.refresh))
                solution = head._solver.solution
                rows = x[:L].double() / head.rho**0.5
                target = torch.full((L, 10), -1.0, dtype=torch.float64).scatter_(1, y[:L, None], 1.0)
                solution.append(rows, target, torch.full((L,), -1.0, dtype=torch.float64), -1, -float(L))
                update.append(seconds(solution.take_in))
            ratio = statistics.median(update) / statistics.median(again)
            cells.append(f"J/{share}: {ratio:.2f} ({rule})")
        print(f"  J={J:5d}   " + "   ".join(cells))


def groups() -> None:
    """All sets that select_groups compares for 20 groups, against one factor and inverse, in processor time."""
    print("\nComparing sets of 20 groups: processor time / that of one factor and inverse   (target: <= 3)")
    for J in (4096, 10000):
        generator = torch.Generator().manual_seed(0)
        U = torch.randn(J, 100, dtype=torch.float64, generator=generator)
        R = torch.randn(J, 10, dtype=torch.float64, generator=generator)
        G = (U @ U.mT).add_(torch.diag(torch.rand(J, dtype=torch.float64, generator=generator)))
        parts = list(torch.arange(J).tensor_split(20))
        start = time.process_time()
        eliminate(G.clone(), R, 1e6, parts, 1.0, 2.0 * J, True)
        middle = time.process_time()
        G.diagonal().add_(1.0)
        torch.cholesky_inverse(torch.linalg.cholesky(G))
        one = time.process_time() - middle
        ours = middle - start
        print(f"  J={J:5d}   factor and inverse {one:5.1f} s   sets {ours:5.1f} s   ratio {ours / one:.2f}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"bulk": bulk, "rows": rows, "single": single, "block": block, "solve": solve, "crossover": crossover}
    parser.add_argument("--only", choices=[*tables, "groups"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.rounds} rounds")
    for name, table in tables.items():
        if options.only in (None, name):
            table(options.rounds)
    if options.only == "groups":
        groups()


if __name__ == "__main__":
    main()
