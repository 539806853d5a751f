"""Computes the shards of a job by several processes: of this machine, or of a Ray cluster."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from typing import Any

import torch

from hooked_lm.progress import progress_bar
from hooked_lm.shards.job import Job
from hooked_lm.shards.travel import ByFile

ATTEMPTS = 3  # of a shard whose workers die
DIED = "a worker died, as when memory runs out; complete shards are kept: run the same command again"
NOT_STARTED = (
    "no worker process could start; the error that it printed is above. Each worker first imports the script that it is called "
    "from: the call must stand under `if __name__ == '__main__':` there. Or compute in this process, with n_workers=1"
)

Part = list[int] | tuple[int, int]
"""The shards of one process: their numbers, or of a stream the first one and the step to the next."""

_work: tuple[Job, Event] | None = None  # of a worker process; the event is set after an error in any of them


def by_processes(job: Job, shards: Iterable[int], n_workers: int, progress: bool | None = None) -> None:
    """Computes shards by processes of this machine, with one model each; if there are several GPUs, on different ones.

    The weights of a model on the CPU are shared. After an error no further shard begins; it is raised when those in hand are
    complete. Raises RuntimeError if a worker dies or none can start.
    """
    context = torch.multiprocessing.get_context("spawn")
    numbers, started, stopped = context.SimpleQueue(), context.Event(), context.Event()
    for number in range(n_workers):
        numbers.put(number)
    parts = _parts(job, shards, n_workers)
    total = None if job.plan.n_shards is None else len(parts)
    with (
        ByFile(job) as given,
        ProcessPoolExecutor(n_workers, context, _start, (given, numbers, started, stopped)) as pool,
    ):
        try:
            futures = [pool.submit(_compute, part) for part in parts]
            with progress_bar(job.plan.KIND, total, progress, unit="shards") as bar:
                for future in as_completed(futures):
                    future.result()
                    bar.update()
        except BrokenProcessPool:
            raise RuntimeError(DIED if started.is_set() else NOT_STARTED) from None
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


def _parts(job: Job, shards: Iterable[int], n_workers: int) -> list[Part]:
    """The shards, one at a time; of a stream whose end is not known (first, step) for each worker."""
    if job.plan.n_shards is None:
        first, second = islice(shards, 2)
        step = second - first
        return [(first + i * step, step * n_workers) for i in range(n_workers)]
    return [[shard] for shard in job.left(shards)]


def _start(job: Job | ByFile, numbers: "SimpleQueue[int]", started: Event, stopped: Event) -> None:
    global _work
    assert isinstance(job, Job), "it has arrived"
    started.set()
    _work, number, n_gpus = (job, stopped), numbers.get(), torch.cuda.device_count()
    if n_gpus > 1 and job.plan.model["device"] == "cuda":
        job.model.to(f"cuda:{number % n_gpus}")


def _compute(part: Part) -> None:
    assert _work is not None, "the worker has started"
    job, stopped = _work
    shards = part if isinstance(part, list) else range(part[0], 1 << 62, part[1])
    try:
        job.compute(_until(stopped, shards), progress=False)
    except BaseException:
        stopped.set()
        raise


def _until(stopped: Event, shards: Iterable[int]) -> Iterator[int]:
    """Yields shards until the workers are stopped: those in the queue of the pool can no longer be cancelled."""
    for shard in shards:
        if stopped.is_set():
            return
        yield shard


def by_ray(job: Job, shards: Iterable[int], n_workers: int, progress: bool | None = None) -> None:
    """Computes shards by actors of a Ray cluster, which is started on this machine if there is none.

    Each actor has a model; the shard of an actor that dies goes to another. The folder must be the same on all machines. Raises
    ImportError without Ray, ValueError for a stream whose end is not known, RuntimeError if a shard kills three actors.
    """
    try:
        import ray
    except ImportError:
        raise ImportError("executor='ray' needs the package ray: pip install 'hooked-lm[ray]'") from None
    if job.plan.n_shards is None:
        raise ValueError("executor='ray' gives out shards of known number: give max_documents for a stream")
    on_gpu = job.plan.model["device"] == "cuda"
    actor = ray.remote(num_cpus=job.plan.threads, num_gpus=int(on_gpu))(Worker)
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    shared, left = ray.put(job), job.left(shards)
    died = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)
    attempts: dict[int, int] = dict.fromkeys(left, 0)
    running: dict[Any, tuple[Any, int]] = {}
    with progress_bar(job.plan.KIND, len(left), progress, unit="shards") as bar:
        idle = [actor.remote(shared) for _ in range(min(n_workers, len(left)))]
        while left or running:
            while left and idle:
                worker, shard = idle.pop(), left.pop(0)
                running[worker.compute.remote(shard)] = worker, shard
            [ready], _ = ray.wait(list(running), num_returns=1)
            worker, shard = running.pop(ready)
            try:
                ray.get(ready)
                idle.append(worker)
                bar.update()
            except died:
                attempts[shard] += 1
                if attempts[shard] == ATTEMPTS:
                    raise RuntimeError(f"shard {shard}, {ATTEMPTS} times: {DIED}") from None
                left.insert(0, shard)
                idle.append(actor.remote(shared))
        for worker in idle:
            ray.kill(worker)


class Worker:
    """An actor that computes shards."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def compute(self, shard: int) -> None:
        """Computes one shard."""
        self.job.compute([shard], progress=False)


EXECUTORS: dict[str, Callable[..., None]] = {"processes": by_processes, "ray": by_ray}
