"""One all-reduce of 100 MB between two nodes at 100 MB/s, from 2 s to 3 s, and links that misbehave."""

from simdist.scenario import loads

BASE = """
cluster:
  nodes: 2
  gpus_per_node: 1
  fabric: ideal
  network: {latency: 0 s, bandwidth: 100 MB/s}
  storage: {latency: 0 s, bandwidth: 50 MB/s}
workload:
  tensors: [{name: w, count: 25000000}]
  batch_size: 1
  forward: 1 s
  backward: 1 s
  optimize: 0 s
schedules: [{kind: sync, bucket_size: 1 GB, first_bucket_size: 1 GB}]
steps: 1
"""


def scenario_with(*, disturbances=(), background=(), base=BASE, **changes):
    text = f"{base}disturbances: [{', '.join(disturbances)}]\nbackground: [{', '.join(background)}]\n"
    return loads(text).changed(**changes)
