"""A small reinforcement learning system of the usual make, to be broken beside ours on the same workload.

    launcher ─► scheduler-0 (HTTP API) ─► model-0 … (train workers), rollout-0 … (rollout workers, an engine in each)
             └► master-0 (controller, with the meta-server in it) ── HTTP ──► all of them
             └► monitor-0 … (one per host: looks from outside, is no part of it)

It computes with the same model, engine, losses and data as everything else here, so without a fault it trains to the
same end. What differs is how it is put together, and nothing in it knows of any fault: what it does when something
breaks follows from these choices, all of them common.

- One controller calls workers by HTTP, each of which does one thing at a time; every exception is an HTTP 500.
- New weights go through a meta-server, one request per tensor, while rollout workers ask for keys until they are
  there; an hour is allowed for it. Or they go through the checkpoint of the step before.
- A rollout worker that is gone gives no samples; whether there are enough is the business of the train stage.
- Trainer and rollout worker hand a shared device over by a notification that nobody confirms, and that is dropped when
  its sender has stopped waiting.
- A checkpoint is written where it will be read, and a save that takes too long is not waited for.
- Whatever goes wrong, clean-up follows, through the scheduler's API, and says its own errors last.

Hours would take hours: `scale.py`. In plain fine-tuning (`algorithm.name: sft`) there is no controller and no rollout:
ranks run one loop and end with their own error (`plain.py`); the contrast.
"""
