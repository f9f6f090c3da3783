"""A stand-in for a GPU that measures at once."""

from attnlib.run import store, study
from attnlib.run.schema import now

SLUG = "test-gpu-0badcafe"
GPU = {"gpu": "Test GPU", "gpu_id": "0badcafe", "compute_capability": "9.0"}

WOBBLE = (1.0, 1.001, 0.999, 1.0005)


class Lab:
    """Times of jobs, a note of each, records in the test's store.

    `us`, `noise` (a factor a round) and `failing` (a status) are by `key` of an item and a release;
    `usual` says microseconds and kernel family of a release, `is_hot` whether an item's round is
    throttled.
    """

    def __init__(self, make, usual, key=lambda item, release: release):
        self.make = make
        self.usual = usual
        self.key = key
        self.jobs = []
        self.us = {}
        self.noise = {}
        self.failing = {}
        self.is_hot = lambda item, number: False

    def stand_in(self, monkeypatch):
        """Measure for `run.study`, on a machine where every release can be had."""
        monkeypatch.setattr(study, "_has_cuda", lambda: True)
        monkeypatch.setattr(study, "describe", lambda device: GPU)
        monkeypatch.setattr(study, "run_job", self.run)
        monkeypatch.setattr(study, "overlay_for", lambda package, release, given: None)

    def keep(self, name, count):
        """Keep the first records of a study, as if the search had been stopped there."""
        folder = store.measured_path(name, SLUG)
        for row_id in store.load(name, SLUG)["id"][count:]:
            (folder / f"{row_id}.json").unlink()
        self.jobs.clear()

    def run(self, job, machine, overlay, watch):
        self.jobs.append(job)
        usual, family = self.usual(job.release)
        for item in job.items:
            key = self.key(item, job.release)
            status = self.failing.get(key, "ok")
            noise = self.noise.get(key, WOBBLE)
            us = self.us.get(key, usual) * noise[job.round % len(noise)]
            times = {"run_us": (us,) * 3} if status == "ok" else {"reason": "no\nluck"}
            if self.is_hot(item, job.round):
                times["state_after"] = {"throttle_reasons": 0x40}
            found = {"kernel_family": family, "command": job.command, **times}
            named = {"study": job.study, "round": job.round, "item": item, "machine": machine}
            named["started_at"] = now()
            store.keep(self.make(status=status, **named, **found))

    def order(self):
        """Round, release and number of items of each job since this was asked last."""
        jobs = self.jobs
        self.jobs = []
        return [(job.round, job.release, len(job.items)) for job in jobs]
