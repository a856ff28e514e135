"""A deliberately conventional RL training system, used for contrast: faults are injected into it on the same workloads.

    launcher ─► scheduler-0 (HTTP API) ─► model-0 … (train workers), rollout-0 … (rollout workers, an engine in each)
             └► master-0 (controller, contains the meta-server) ── HTTP ──► all of them
             └► monitor-0 … (one per host: measures from outside, not part of the system)

It uses the same model, engine, losses and data as Kintsugi, so without a fault it trains to the same result. It differs
in its architecture, and contains no code for injected faults: its behaviour under a fault follows from these common
design choices.

- One controller calls workers by HTTP. Each worker handles one request at a time; every exception is an HTTP 500.
- New weights go through a meta-server, one request per tensor, while rollout workers poll for the keys; the time-out
  is an hour. Alternatively they go through the checkpoint of the step before.
- A rollout worker that is gone returns no samples; the train stage checks whether there are enough.
- Trainer and rollout worker hand over a shared device by a notification without acknowledgement, which is dropped
  when its sender has timed out.
- A checkpoint is written directly to its final location, and a save that takes too long is abandoned.
- Every error is followed by clean-up through the scheduler's API; errors of the clean-up are logged last.

Long time-outs are scaled down (`timeouts.py`). In plain fine-tuning (`algorithm.name: sft`) there is no controller and
no rollout: the ranks run one loop and exit with their own error (`plain_sft.py`).
"""
