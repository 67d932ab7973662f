"""The bugs that `tools/mutants.py` plants, room by room."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug that somebody might write.

    Args:
        room: Part of the project.
        name: The bug.
        file: Where, from the root of the project.
        old: Text of the file, which it has once.
        new: Text in its place.
        tests: Arguments for pytest: those that should fail.
        equivalent: Why no test can fail, in a sentence; empty if one can.
    """

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""


_WALK, _CHECK = "simdist/plan/walk.py", "simdist/plan/check.py"
_CODEC, _DOCUMENT = "simdist/plan/codec.py", "simdist/plan/plan.py"
_TEST_WALK = ("tests/simdist/plan/test_walk.py",)
_TEST_PLAN = ("tests/simdist/plan/test_plan.py",)
_TEST_CHECK = ("tests/simdist/plan/test_check.py",)

_PLAN = (
    Mutant(
        "plan",
        "a write waits for the readers on one stream only",
        _WALK,
        "needed.extend(self._buffers[name].readers.values())",
        "needed.extend(list(self._buffers[name].readers.values())[:1])",
        (*_TEST_WALK, "-k", "naive_derivation"),
    ),
    Mutant(
        "plan",
        "operations do not wait for the host that enqueues them",
        _WALK,
        "needed = [host] if host else []",
        "needed: list[_Done] = []",
        (*_TEST_WALK, "-k", "host"),
    ),
    Mutant(
        "plan",
        "implied dependencies are kept",
        _WALK,
        "sorted(needed, key=lambda done: -done.index)",
        "sorted(needed, key=lambda done: done.index)",
        (*_TEST_WALK, "-k", "fused or implies"),
    ),
    Mutant(
        "plan",
        "a clock that will overtake another does not end a repetition",
        _WALK,
        "return all(min(clocks, default=limit) >= limit for clocks, limit in zip(moves_from, stays_at, strict=True))",
        "return True",
        (*_TEST_WALK, "-k", "for_once"),
    ),
    Mutant(
        "plan",
        "what one stream knows to be done counts as known to all",
        _WALK,
        "floor = [min(known) for known",
        "floor = [max(known) for known",
        (*_TEST_WALK, "-k", "live"),
    ),
    Mutant(
        "plan",
        "a divisor of 2 is not written",
        _DOCUMENT,
        '"divisor": 1,',
        '"divisor": 2,',
        (*_TEST_PLAN, "-k", "later_field"),
    ),
    Mutant(
        "plan",
        "the digest depends on the name",
        _DOCUMENT,
        'del document["name"]',
        'del document["format"]',
        (*_TEST_PLAN, "-k", "digest"),
    ),
    Mutant(
        "plan",
        "of two equal keys one is lost",
        _CODEC,
        "if len(known) < len(pairs)",
        "if len(known) > len(pairs)",
        (*_TEST_PLAN, "-k", "twice"),
    ),
    Mutant(
        "plan",
        "what is read counts as written",
        _CHECK,
        "written.update(ops.writes(op))",
        "written.update((*ops.reads(op), *ops.writes(op), *buffers))",
        _TEST_CHECK,
    ),
    Mutant(
        "plan",
        "shards may be smaller than a slice",
        _CHECK,
        "if whole.count != shard.count * group.size:",
        "if whole.count < shard.count * group.size:",
        _TEST_CHECK,
    ),
    Mutant(
        "plan",
        "a selection of nothing is legal",
        _CHECK,
        "if not 1 <= op.k <= src.count:",
        "if not 0 <= op.k <= src.count:",
        _TEST_CHECK,
        equivalent="a buffer has at least one element, so a selection of none does not fit the buffer that it is for",
    ),
    Mutant(
        "plan",
        "a selection may take one more than there are",
        _CHECK,
        "if not 1 <= op.k <= src.count:",
        "if not 1 <= op.k <= src.count + 1:",
        _TEST_CHECK,
    ),
    Mutant(
        "plan",
        "a root may be one beyond the group",
        _CHECK,
        "not 0 <= op.root < op.group.size",
        "not 0 <= op.root <= op.group.size",
        _TEST_CHECK,
    ),
    Mutant(
        "plan",
        "lengths that become known later are not asked for again",
        _CHECK,
        "while len(counts) > n_known:",
        "while n_known < 0:",
        _TEST_CHECK,
    ),
)

_DES, _FAST, _RECURRENCE = "simdist/engines/des.py", "simdist/engines/fast.py", "simdist/engines/recurrence.py"
_TEST_ENGINES = ("tests/simdist/engines/test_engines.py",)
_TEST_TIMELINES = ("tests/simdist/engines/test_timelines.py",)

_ENGINES = (
    Mutant(
        "engines",
        "a collective starts with the member that was looked at last",
        _DES,
        "arrivals.latest_s = max(arrivals.latest_s, now_s)",
        "arrivals.latest_s = now_s",
        _TEST_TIMELINES,
    ),
    Mutant(
        "engines",
        "an operation waits for the last of its dependencies only",
        _DES,
        "if end_s > now_s:",
        "if end_s != now_s:",
        _TEST_TIMELINES,
    ),
    Mutant(
        "engines",
        "a tick is counted from when its stream is free",
        _DES,
        "written_s = max((self.rows[2][other][rank] for other in task.after), default=0.0)",
        "written_s = now_s",
        (*_TEST_ENGINES, "-k", "tick"),
    ),
    Mutant(
        "engines",
        "the first members to arrive are told the end of their group, the last is not",
        _DES,
        "            self._tell(task.index, rank)",
        "            if rank != members[-1]:\n                self._tell(task.index, rank)",
        _TEST_TIMELINES,
    ),
    Mutant(
        "engines",
        "the fast engine waits for the last dependency only",
        _RECURRENCE,
        "ready = maximum(ready, rows[other])",
        "ready = rows[other]",
        _TEST_TIMELINES,
    ),
    Mutant(
        "engines",
        "groups with a stride are taken for neighbours",
        _RECURRENCE,
        "if stride == 1 and n <= _FEW_COLUMNS",
        "if n <= _FEW_COLUMNS",
        _TEST_TIMELINES,
    ),
    Mutant(
        "engines",
        "delays of a chunk begin one step late",
        _RECURRENCE,
        "            self._first = self._end\n",
        "            self._first = max(0, self._end - 1)\n",
        (*_TEST_ENGINES, "-k", "chunks or breakdown_of_the_trace"),
    ),
    Mutant(
        "engines",
        "the fast engine forgets what comes from two repetitions ago",
        _RECURRENCE,
        "needed.update(range(distance % n or n, distance, n))",
        "needed.update(range(distance % n or n, distance, 2 * n))",
        (*_TEST_ENGINES, "-k", "last_bit"),
    ),
    Mutant(
        "engines",
        "an operation is ready with the first thing that it waits for",
        _FAST,
        "np.maximum(ready, source, out=ready)",
        "np.minimum(ready, source, out=ready)",
        _TEST_TIMELINES,
    ),
    Mutant(
        "engines",
        "a link is free again as soon as a transfer has begun",
        _FAST,
        "np.maximum.at(self._busy_s, use.resources, end_s[use.groups])",
        "np.maximum.at(self._busy_s, use.resources, start_s[use.groups])",
        (*_TEST_ENGINES, "-k", "fast_engine"),
    ),
    Mutant(
        "engines",
        "groups that share a link may start apart",
        _FAST,
        "if (start_s != start_s[use.leader]).any():",
        "if (start_s < start_s[use.leader]).all():",
        (*_TEST_ENGINES, "tests/simdist/engines/test_timelines.py", "-k", "agree or fast_engine or auto or nic"),
    ),
)

_FLUID, _MAX_MIN = "simdist/engines/network/fluid.py", "simdist/engines/network/max_min.py"
_INCREMENTAL, _FAIR_SHARE = "simdist/engines/network/incremental.py", "simdist/engines/network/fair_share.py"
_TEST_FLUID = ("tests/simdist/engines/network/test_fluid.py",)
_TEST_MAX_MIN = ("tests/simdist/engines/network/test_max_min.py",)
_TEST_INCREMENTAL = ("tests/simdist/engines/network/test_incremental.py",)

_NETWORK = (
    Mutant(
        "network",
        "what flowed before the last change of rates is forgotten",
        _FLUID,
        "flow.left_nbytes -= flow.rate_Bps * elapsed_s",
        "flow.left_nbytes = flow.most_nbytes - flow.rate_Bps * elapsed_s",
        _TEST_FLUID,
    ),
    Mutant(
        "network",
        "ends that were planned at former rates happen",
        _FLUID,
        "if component.n_plans != plan:",
        "if component.n_plans < plan:",
        _TEST_FLUID,
    ),
    Mutant(
        "network",
        "those who stay keep their rates when others end",
        _FLUID,
        "self._left.add(component.number)",
        "self._left.discard(component.number)",
        _TEST_INCREMENTAL,
    ),
    Mutant(
        "network",
        "the latency of later stages is left out",
        _FLUID,
        "flow_s = start_s + stages[0].latency_s if stages else start_s",
        "flow_s = start_s + stages[0].latency_s if len(stages) > 1 else start_s",
        _TEST_FLUID,
    ),
    Mutant(
        "network",
        "who stops leaves nothing of what it does not use",
        _MAX_MIN,
        "np.subtract.at(self._left_Bps, resource, weight * self._level_Bps)",
        "np.subtract.at(self._left_Bps, resource, self._level_Bps)",
        _TEST_MAX_MIN,
    ),
    Mutant(
        "network",
        "levels may fall by rounding",
        _MAX_MIN,
        "self._level_Bps = max(self._level_Bps, lowest_Bps)",
        "self._level_Bps = lowest_Bps",
        (*_TEST_MAX_MIN, "-k", "below_those"),
    ),
    Mutant(
        "network",
        "rates are those of all bytes, not of the most used resource",
        _MAX_MIN,
        "np.maximum.at(most_nbytes, flow, nbytes)",
        "np.add.at(most_nbytes, flow, nbytes)",
        _TEST_MAX_MIN,
    ),
    Mutant(
        "network",
        "those at their own pace do not count when a hub is full",
        _INCREMENTAL,
        "left_Bps = np.array(self._state.capacity_Bps) - np.array(self._state.own.load)",
        "left_Bps = np.array(self._state.capacity_Bps)",
        _TEST_INCREMENTAL,
    ),
    Mutant(
        "network",
        "who is slower alone stays with the level",
        _INCREMENTAL,
        "and slowest[0] < rate_Bps * (1 - SAME):",
        "and slowest[0] < rate_Bps * SAME:",
        _TEST_INCREMENTAL,
    ),
    Mutant(
        "network",
        "a resource remembers who has left",
        _FAIR_SHARE,
        "            del self._user_of[resource]",
        "            self._user_of[resource] = member",
        _TEST_INCREMENTAL,
    ),
    Mutant(
        "network",
        "virtual time stands still when a rate changes",
        _FAIR_SHARE,
        "self.virtual, self.settled_s = self.virtual_at(now_s), now_s",
        "self.settled_s = now_s",
        _TEST_INCREMENTAL,
    ),
    Mutant(
        "network",
        "who joins is put at his own pace, though a hub is full",
        _FAIR_SHARE,
        "if there is not None and there.rate_Bps < lowest_Bps:",
        "if there is not None and there.rate_Bps > lowest_Bps:",
        _TEST_INCREMENTAL,
        equivalent="to join marks the levels of the hubs as changed; `settle` moves there those that are faster alone",
    ),
)

_ALGORITHMS = "simdist/cost/algorithms/"
_TOPOLOGY, _COMPUTE, _LOADS = "simdist/cost/topology.py", "simdist/cost/compute.py", "simdist/cost/loads.py"
_TEST_COST = ("tests/simdist/cost/test_cost.py",)
_TEST_COLLECTIVES = ("tests/simdist/cost/test_collectives.py",)
_TEST_LOADS = ("tests/simdist/cost/test_loads.py",)

_COST = (
    Mutant(
        "cost",
        "a ring takes one round too many",
        _ALGORITHMS + "ring.py",
        "rounds = times * (call.n - 1)",
        "rounds = times * call.n",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "the chain of a reduce begins with its root",
        _ALGORITHMS + "ring.py",
        "chain = np.roll(call.members, -root - 1)",
        "chain = np.roll(call.members, -root)",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "a tree reduces to the first member whatever the root",
        _ALGORITHMS + "tree.py",
        "_binomial(np.roll(call.members, -root), call.nbytes, towards_root=True)",
        "_binomial(call.members, call.nbytes, towards_root=True)",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "halving begins with all of the buffer",
        _ALGORITHMS + "halving_doubling.py",
        "call.nbytes / 2 ** (level + 1)",
        "call.nbytes / 2**level",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "both trees carry all of the buffer",
        _ALGORITHMS + "double_tree.py",
        "call.nbytes / 2,",
        "call.nbytes,",
        _TEST_COLLECTIVES,
    ),
    Mutant(
        "cost",
        "the second tree is not shifted for an odd number",
        _ALGORITHMS + "double_tree.py",
        "(np.arange(n) + 1) % n",
        "np.arange(n) % n",
        _TEST_COLLECTIVES,
    ),
    Mutant(
        "cost",
        "trees of NCCL reach all of the bandwidth",
        _ALGORITHMS + "nccl.py",
        "return _TREE_SHARE * self.share * float(of_size)",
        "return self.share * float(of_size)",
        _TEST_COLLECTIVES,
    ),
    Mutant(
        "cost",
        "NCCL takes the slower algorithm",
        _ALGORITHMS + "__init__.py",
        "by_tree.alone_s(capacity_Bps) < by_ring.alone_s(capacity_Bps)",
        "by_tree.alone_s(capacity_Bps) > by_ring.alone_s(capacity_Bps)",
        _TEST_COLLECTIVES,
    ),
    Mutant(
        "cost",
        "rings between nodes only reduce",
        _ALGORITHMS + "hierarchical.py",
        "rounds=2 * (m - 1)",
        "rounds=m - 1",
        _TEST_COLLECTIVES,
    ),
    Mutant(
        "cost",
        "a server sends to itself",
        _ALGORITHMS + "server.py",
        "moves = member != at[part]",
        "moves = member >= 0",
        _TEST_COLLECTIVES,
    ),
    Mutant(
        "cost",
        "gloo's root gathers whole buffers",
        _ALGORITHMS + "gloo.py",
        "call.members[root]), call.nbytes / call.n)",
        "call.members[root]), call.nbytes)",
        _TEST_COLLECTIVES,
    ),
    Mutant(
        "cost",
        "the fastest stretch of a ring counts for its latency",
        _TOPOLOGY,
        "ahead[: len(ahead) - rest]).max())",
        "ahead[: len(ahead) - rest]).min())",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "network cards send and receive in turn",
        "simdist/cost/costs.py",
        "return 2 * self.world_size + self.n_machines + machine",
        "return 2 * self.world_size + machine",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "the overhead of a collective counts for each of its stages",
        _TOPOLOGY,
        "0.0 if n else self.overhead_s",
        "self.overhead_s",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "a backward pass takes as long as a forward pass",
        _COMPUTE,
        "2 * self.forward_s if workload.backward_s is None",
        "self.forward_s if workload.backward_s is None",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "a measured backward pass is shared by FLOPs",
        _COMPUTE,
        "self._backward_share_before[last] - self._backward_share_before[first]",
        "self._share_before[last] - self._share_before[first]",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "a scatter writes its places without reading them",
        _COMPUTE,
        "touched_nbytes = 2 * src.count",
        "touched_nbytes = src.count",
        _TEST_COST,
    ),
    Mutant(
        "cost",
        "the last, shorter round of the readers takes no time",
        _LOADS,
        "return -(-n // n_threads)",
        "return n // n_threads",
        _TEST_LOADS,
    ),
    Mutant(
        "cost",
        "files from disk need no decoding",
        _LOADS,
        "n_decoded = (reads.level >= DISK).sum(axis=1)",
        "n_decoded = (reads.level > DISK).sum(axis=1)",
        _TEST_LOADS,
    ),
    Mutant(
        "cost",
        "the last samples are decoded on cores that are not there",
        _LOADS,
        "n_at_once = min(dataset.decoders, self._cores_per_rank)",
        "n_at_once = dataset.decoders",
        _TEST_LOADS,
    ),
    Mutant(
        "cost",
        "a peer answers before it was asked",
        _LOADS,
        "2 * topology.network.latency_s + self._memory.latency_s",
        "topology.network.latency_s + self._memory.latency_s",
        _TEST_LOADS,
    ),
    Mutant(
        "cost",
        "after a reduce-scatter by a ring, members own the chunk after theirs",
        "tests/expansion/rounds.py",
        "yield from _around(n, adds=True, ahead=-1)",
        "yield from _around(n, adds=True, ahead=0)",
        ("tests/simdist/cost/test_expansion.py", "-k", "owner"),
    ),
    Mutant(
        "cost",
        "halving keeps the half that it should send",
        "tests/expansion/rounds.py",
        "kept = kept + upper * length",
        "kept = kept + (1 - upper) * length",
        ("tests/simdist/cost/test_expansion.py", "-k", "owner"),
    ),
)

_SCHEDULES_AT = "simdist/schedules/"
_TEST_SCHEDULES = ("tests/simdist/schedules/test_schedules.py",)
_TEST_GRADIENTS = ("tests/simdist/schedules/test_gradient_schedules.py",)
_TEST_FUSION = ("tests/simdist/schedules/test_fusion.py",)

_SCHEDULES = (
    Mutant(
        "schedules",
        "periods are counted from step 0, not from the end of the warm-up",
        _SCHEDULES_AT + "averaging.py",
        "(step - self.warmup_steps) % period == period - 1",
        "step % period == period - 1",
        _TEST_SCHEDULES,
    ),
    Mutant(
        "schedules",
        "where two levels meet the smaller one acts",
        _SCHEDULES_AT + "hierarchical_sgd.py",
        "for period, size in reversed(self.levels.items()):",
        "for period, size in self.levels.items():",
        _TEST_SCHEDULES,
    ),
    Mutant(
        "schedules",
        "a bucket that just reaches its limit stays open",
        _SCHEDULES_AT + "parts.py",
        "if held >= (nbytes if buckets else first_nbytes)",
        "if held > (nbytes if buckets else first_nbytes)",
        _TEST_SCHEDULES,
    ),
    Mutant(
        "schedules",
        "a batch is loaded one step too far ahead",
        _SCHEDULES_AT + "parts.py",
        "range(step + depth - 1, step + depth)",
        "range(step + depth, step + depth + 1)",
        _TEST_SCHEDULES,
    ),
    Mutant(
        "schedules",
        "buckets are padded by what is too much",
        _SCHEDULES_AT + "parts.py",
        "padding = -count % multiple",
        "padding = count % multiple",
        (*_TEST_SCHEDULES, *_TEST_GRADIENTS),
    ),
    Mutant(
        "schedules",
        "every merge drops half of what is dropped",
        _SCHEDULES_AT + "gtopk.py",
        "divisor=2 * distance",
        "divisor=2",
        _TEST_GRADIENTS,
    ),
    Mutant(
        "schedules",
        "sums of nodes are divided by all ranks",
        _SCHEDULES_AT + "hitopk.py",
        "divisor=peers.size",
        "divisor=job.world_size",
        (*_TEST_GRADIENTS, *_TEST_SCHEDULES),
    ),
    Mutant(
        "schedules",
        "one server too many holds one element more",
        _SCHEDULES_AT + "parameter_server.py",
        "share + (server < rest)",
        "share + (server <= rest)",
        _TEST_GRADIENTS,
    ),
    Mutant(
        "schedules",
        "greedy placement counts tensors, not elements",
        _SCHEDULES_AT + "parameter_server.py",
        "load[server] += count",
        "load[server] += 1",
        _TEST_GRADIENTS,
    ),
    Mutant(
        "schedules",
        "gradients that just fill the fusion buffer do not fit",
        _SCHEDULES_AT + "fusion.py",
        "<= self._fusion.buffer_nbytes",
        "< self._fusion.buffer_nbytes",
        _TEST_FUSION,
    ),
    Mutant(
        "schedules",
        "gradients in half precision are ready at once",
        _SCHEDULES_AT + "fusion.py",
        "ready_s[op.dst] = ready_s[op.src]",
        "ready_s[op.dst] = 0.0",
        _TEST_FUSION,
    ),
    Mutant(
        "schedules",
        "the backward pass begins with the first tensor",
        _SCHEDULES_AT + "sync.py",
        "accumulate(reversed(job.tensor_backward_s))",
        "accumulate(job.tensor_backward_s)",
        _TEST_FUSION,
    ),
)

_TEST_CACHING = ("tests/simdist/caching/test_caching.py",)

_CACHING = (
    Mutant(
        "caching",
        "a file that just fits is not kept",
        "simdist/caching/keeping.py",
        'np.searchsorted(totals, room_nbytes, side="right")',
        'np.searchsorted(totals, room_nbytes, side="left")',
        (*_TEST_CACHING, "-k", "policy or fit"),
    ),
    Mutant(
        "caching",
        "a sample that no node has is read from a peer",
        "simdist/caching/keeping.py",
        "(held_by != node) & (held_by != NOWHERE)",
        "(held_by != node)",
        (*_TEST_CACHING, "-k", "policy or room_for_all"),
    ),
    Mutant(
        "caching",
        "what is kept takes no room",
        "simdist/caching/keeping.py",
        "room_nbytes[node] -= nbytes[fits].sum()",
        "room_nbytes[node] -= 0",
        (*_TEST_CACHING, "-k", "keep_what"),
    ),
    Mutant(
        "caching",
        "the first that came leaves a disk, used or not",
        "simdist/caching/evicting.py",
        "self._disks[node].held.move_to_end(sample)",
        "self._disks[node].held[sample]",
        (*_TEST_CACHING, "-k", "steady_hits"),
    ),
    Mutant(
        "caching",
        "a sample that has left a memory still has an owner",
        "simdist/caching/evicting.py",
        "            del self._owner[oldest]",
        "            self._owner[oldest] = node",
        (*_TEST_CACHING, "-k", "within_a_load"),
    ),
    Mutant(
        "caching",
        "memories survive the end of a run",
        "simdist/caching/lookup.py",
        "        caches.clear_memory()",
        "        pass",
        (*_TEST_CACHING, "-k", "within_their_capacity or warm"),
    ),
    Mutant(
        "caching",
        "all nodes shuffle the first part",
        "simdist/caching/batches.py",
        "first = part * size + _least(",
        "first = _least(",
        (*_TEST_CACHING, "-k", "epoch_reads or node_read"),
    ),
    Mutant(
        "caching",
        "the last of the samples that are read is lost",
        "simdist/caching/batches.py",
        "held, places = held[held <= most], places[held <= most]",
        "held, places = held[held < most], places[held < most]",
        (*_TEST_CACHING, "-k", "epoch_reads or random_keys"),
    ),
)

_PROVER, _SYMBOLS = "simdist/proof/prover.py", "simdist/proof/symbols.py"
_TEST_PROOF = ("tests/simdist/proof/test_proof.py",)

_PROOF = (
    Mutant(
        "proof",
        "declared means are those over the world",
        _PROVER,
        "weights.denominator * group.size)",
        "weights.denominator * self._plan.world_size)",
        _TEST_PROOF,
    ),
    Mutant(
        "proof",
        "a batch may be used twice",
        _PROVER,
        'state[name] = self._value(name, {Tag("used"): self._own})',
        "state[name] = self._value(name, {})",
        _TEST_PROOF,
    ),
    Mutant(
        "proof",
        "gradients of other tensors may be applied",
        _PROVER,
        "            self._demand_places(grad, state[grad])",
        "            pass",
        _TEST_PROOF,
    ),
    Mutant(
        "proof",
        "what a merge drops may be counted twice",
        _PROVER,
        "(totals[of_atom] != op.divisor * held)",
        "(totals[of_atom] < op.divisor * held)",
        _TEST_PROOF,
    ),
    Mutant(
        "proof",
        "a step that was proved once is right whatever it finds",
        _PROVER,
        "            key = known",
        "            key = key or known",
        _TEST_PROOF,
    ),
    Mutant(
        "proof",
        "gradients do not age",
        _SYMBOLS,
        "older = Tag(tag.kind, min(tag.age + 1, 2))",
        "older = tag",
        _TEST_PROOF,
    ),
    Mutant(
        "proof",
        "an all-gather mixes the members of groups with a stride",
        _SYMBOLS,
        "whole = np.moveaxis(view, 1, 2).reshape(",
        "whole = view.reshape(",
        _TEST_PROOF,
    ),
    Mutant(
        "proof",
        "after a reduce all members hold the sum",
        _SYMBOLS,
        "return np.where(root_mask(view, root), view.sum(1, keepdims=True), view)",
        "return np.where(root_mask(view, root), view.sum(1, keepdims=True), view.sum(1, keepdims=True))",
        _TEST_PROOF,
    ),
)

_SAMPLING = "simdist/scenario/sampling.py"
_TEST_DISTURBANCES = ("tests/simdist/scenario/test_disturbances.py",)

_SCENARIO = (
    Mutant(
        "scenario",
        "the numbers of a rank depend on the size of the world",
        _SAMPLING,
        "raw.reshape(self.world_size, _TILE_STEPS).T",
        "raw.reshape(_TILE_STEPS, self.world_size)",
        _TEST_DISTURBANCES,
    ),
    Mutant(
        "scenario",
        "large delays of a heavy tail come more often",
        _SAMPLING,
        "uniforms.closed(start, stop, lane=1)",
        "uniforms.closed(start, stop, lane=0)",
        _TEST_DISTURBANCES,
    ),
    Mutant(
        "scenario",
        "bursts are rare at the start",
        _SAMPLING,
        "bursts.enter / (bursts.enter + bursts.leave)",
        "bursts.enter",
        _TEST_DISTURBANCES,
    ),
    Mutant(
        "scenario",
        "a factor delays by all of the computation",
        _SAMPLING,
        "((factor or 1.0) - 1.0)",
        "(factor or 1.0)",
        _TEST_DISTURBANCES,
    ),
    Mutant(
        "scenario",
        "a second disturbance of a channel replaces the first",
        _SAMPLING,
        "source.ranks] += source.delays(start, stop)",
        "source.ranks] = source.delays(start, stop)",
        _TEST_DISTURBANCES,
    ),
    Mutant(
        "scenario",
        "chunks begin at the start of a tile",
        _SAMPLING,
        "offset = start - first_tile * _TILE_STEPS",
        "offset = 0",
        _TEST_DISTURBANCES,
    ),
    Mutant(
        "scenario",
        "the last recorded step is never resampled after others",
        _SAMPLING,
        "+ offsets) % n_recorded)",
        "+ offsets) % (n_recorded - 1))",
        ("tests/simdist/scenario/test_resampled_recordings.py",),
    ),
    Mutant(
        "scenario",
        "batches of steps cut through tiles",
        _SAMPLING,
        "end = min(stop, (first // size + 1) * size)",
        "end = min(stop, first + size)",
        _TEST_DISTURBANCES,
        equivalent="the words of a tile depend on its number only, so tiles are computed twice and give the same",
    ),
)

_ESTIMATES, _JOB = "simdist/profiles/estimates/", "simdist/profiles/job/"
_STEPS = "simdist/profiles/steps/"
_TEST_KINDS = ("tests/simdist/profiles/test_job_kinds.py", "tests/simdist/profiles/test_ranks_cuda.py")
_TEST_STRAGGLERS = ("tests/simdist/profiles/test_stragglers.py",)
_TEST_JOB_TIMES = ("tests/simdist/profiles/test_job_times.py",)

_PROFILES = (
    Mutant(
        "profiles",
        "a persistent straggler is late only where it is by all of it",
        _ESTIMATES + "stragglers.py",
        "more_s >= late_s / 2",
        "more_s >= late_s",
        _TEST_STRAGGLERS,
    ),
    Mutant(
        "profiles",
        "where all ranks are late, each is a straggler",
        _ESTIMATES + "stragglers.py",
        "own_s - _of_others_s(own_s)",
        "own_s",
        _TEST_STRAGGLERS,
    ),
    Mutant(
        "profiles",
        "one late rank is a late node",
        _ESTIMATES + "stragglers.py",
        "len(of) == len(traced[node]) > 1",
        "len(traced[node]) > 1",
        _TEST_STRAGGLERS,
    ),
    Mutant(
        "profiles",
        "being late in half of the steps is usual",
        _ESTIMATES + "noise.py",
        'np.quantile(seconds, 0.5, axis=axis, method="lower")',
        'np.quantile(seconds, 0.5, axis=axis, method="higher")',
        _TEST_STRAGGLERS,
    ),
    Mutant(
        "profiles",
        "the drift of a clock is corrected the wrong way",
        _JOB + "matching.py",
        "drift = change_s / span_s",
        "drift = -change_s / span_s",
        (*_TEST_JOB_TIMES, "-k", "drift"),
    ),
    Mutant(
        "profiles",
        "collectives that run at once are counted twice",
        _JOB + "matching.py",
        "np.maximum(1, began - ended)",
        "1",
        (*_TEST_JOB_TIMES, "-k", "at_once"),
    ),
    Mutant(
        "profiles",
        "collectives are timed from when the first member came",
        _ESTIMATES + "collectives.py",
        "    last_s = np.nanmax(arrival_s, axis=1)\n    alone_s",
        "    last_s = np.nanmin(arrival_s, axis=1)\n    alone_s",
        (*_TEST_JOB_TIMES, "-k", "waiting_for_late"),
    ),
    Mutant(
        "profiles",
        "times that grow with size are pooled",
        _ESTIMATES + "links.py",
        "_mean_s(blocks[-2]) > _mean_s(blocks[-1])",
        "_mean_s(blocks[-2]) < _mean_s(blocks[-1])",
        (*_TEST_JOB_TIMES, "-k", "measured_times_back or pooled"),
    ),
    Mutant(
        "profiles",
        "steps are numbered away from those of others",
        _JOB + "alignment.py",
        "_renumbered(each, shift - usual)",
        "_renumbered(each, usual - shift)",
        ("tests/simdist/profiles/test_averaging.py", "-k", "numbered"),
    ),
    Mutant(
        "profiles",
        "a wait ends with the first of several collectives",
        "simdist/profiles/steps/cpu_steps.py",
        "float(transfers.end_s[runs].max())",
        "float(transfers.end_s[runs].min())",
        ("tests/simdist/profiles/test_ranks.py",),
    ),
    Mutant(
        "profiles",
        "work launched before the trace belongs to its first step",
        _STEPS + "cuda_steps.py",
        "np.where(known < 0, -np.inf, launch_s[on_stream[known]])",
        "np.where(known < 0, launches.start_s.min(), launch_s[on_stream[known]])",
        _TEST_KINDS,
    ),
    Mutant(
        "profiles",
        "a step of a device ends at the mark",
        _STEPS + "cuda_steps.py",
        "np.maximum(borders_s, kernels.computed(borders_s))",
        "borders_s.copy()",
        _TEST_KINDS,
    ),
    Mutant(
        "profiles",
        "every gap is one between launches",
        _STEPS + "step_parts.py",
        "queue_s = np.stack([queue_s[0] + CLOCKS_S, queue_s[1]])",
        "queue_s = np.stack([queue_s[1], queue_s[1]])",
        _TEST_KINDS,
    ),
    Mutant(
        "profiles",
        "a lag counts once per collective",
        _ESTIMATES + "collectives.py",
        "start_s[row] >= end_s[found].max()",
        "False",
        ("tests/simdist/profiles/test_untraced_ranks.py",),
    ),
    Mutant(
        "profiles",
        "noise has an exponential tail",
        _ESTIMATES + "noise.py",
        "_HEAVIEST = 0.35",
        "_HEAVIEST = 0.0",
        _TEST_STRAGGLERS,
    ),
    Mutant(
        "profiles",
        "names of files prove machines",
        _JOB + "layout.py",
        "not (is_weak and fitting in ([], [1]))",
        "fitting",
        ("tests/simdist/profiles/test_job.py",),
    ),
)

_TEST_WHATIF = ("tests/simdist/whatif/test_whatif.py",)
_TEST_GAINS = ("tests/simdist/whatif/test_gains.py",)

_WHATIF = (
    Mutant(
        "whatif",
        "of two ranks the slower is typical",
        "simdist/whatif/ideal.py",
        "middle = (len(values) - 1) // 2",
        "middle = len(values) // 2",
        _TEST_WHATIF,
    ),
    Mutant(
        "whatif",
        "steps that are not asked for count for the ideal",
        "simdist/whatif/ideal.py",
        "append(each.rows[each.steps >= first_step])",
        "append(each.rows)",
        _TEST_WHATIF,
    ),
    Mutant(
        "whatif",
        "simultaneous pauses are sought along the steps",
        "simdist/whatif/ideal.py",
        "_median(values.T)[:, np.newaxis]",
        "_median(values)[np.newaxis]",
        _TEST_WHATIF,
    ),
    Mutant(
        "whatif",
        "shares of the loss add up to more than all of it",
        "simdist/whatif/verdict.py",
        "both = max(1.0, persistent + simultaneous)",
        "both = 1.0",
        _TEST_WHATIF,
    ),
    Mutant(
        "whatif",
        "of a small job no rank is among the slowest",
        "simdist/whatif/slowdown.py",
        "np.ceil(_SLOWEST_SHARE",
        "np.floor(_SLOWEST_SHARE",
        _TEST_WHATIF,
    ),
    Mutant(
        "whatif",
        "what fixes a rank fixes all but that rank",
        "simdist/whatif/slowdown.py",
        "Kept(ranks=everyone - ranks)",
        "Kept(ranks=ranks)",
        _TEST_WHATIF,
    ),
    Mutant(
        "whatif",
        "a gain is sure if it is possible",
        "simdist/whatif/gains.py",
        "self.interval[0] > 1 + _ROUNDING",
        "self.interval[1] > 1 + _ROUNDING",
        (*_TEST_GAINS, "-k", "sure"),
    ),
    Mutant(
        "whatif",
        "few runs are enough to be sure",
        "simdist/whatif/gains.py",
        "if n_runs < _LEAST_RUNS:",
        "if n_runs < 2:",
        (*_TEST_GAINS, "-k", "sure"),
    ),
)

_STATISTICS = "simdist/studies/statistics.py"
_TEST_STATISTICS = ("tests/simdist/studies/test_statistics.py", _STATISTICS)

_STUDIES = (
    Mutant(
        "studies",
        "the spread is that of the samples, not of what they are from",
        _STATISTICS,
        "samples.std(ddof=1)",
        "samples.std()",
        _TEST_STATISTICS,
    ),
    Mutant(
        "studies",
        "one degree of freedom too many",
        _STATISTICS,
        "student_quantile(n - 1)",
        "student_quantile(n)",
        _TEST_STATISTICS,
    ),
    Mutant(
        "studies",
        "residuals of a ratio are taken over the wrong mean",
        _STATISTICS,
        "/ float(below.mean()))",
        "/ float(above.mean()))",
        _TEST_STATISTICS,
    ),
    Mutant(
        "studies",
        "errors are relative to what was simulated",
        _STATISTICS,
        "ratio(simulated - measured, measured)",
        "ratio(simulated - measured, simulated)",
        _TEST_STATISTICS,
    ),
    Mutant(
        "studies",
        "intervals hold the middle 90 %",
        _STATISTICS,
        "_MIDDLE = (2.5, 97.5)",
        "_MIDDLE = (5.0, 95.0)",
        _TEST_STATISTICS,
    ),
    Mutant(
        "studies",
        "a correlation with values that are not taken about their mean",
        _STATISTICS,
        "a, b = a - a.mean(), b - b.mean()",
        "a, b = a - a.mean(), b",
        _TEST_STATISTICS,
    ),
)

_EXECUTOR = "real/execution/executor.py"
_TEST_EXECUTOR = "tests/real/execution/test_executor.py"
_CLOCK, _RECORDER = "real/recording/clock.py", "real/recording/recorder.py"
_TEST_CLOCK = ("tests/real/recording/test_clock.py", _CLOCK)
_CHECKPOINT, _STATES = "real/checkpoints/checkpoint.py", "real/checkpoints/rank_state.py"
_TEST_CHECKPOINT = "tests/real/checkpoints/test_checkpoint.py"
_TOPK = "real/kernels/topk.py"
_TEST_TOPK = ("tests/real/kernels/test_topk.py",)
_TEST_VALUES = "tests/real/execution/test_values.py"

_REAL = (
    Mutant(
        "real: executor",
        "loads before the first step are not waited for",
        _EXECUTOR,
        "if index >= self._first_index or index in self._loads.early:",
        "if index >= self._first_index:",
        (_TEST_EXECUTOR, "-k", "begin"),
    ),
    Mutant(
        "real: executor",
        "a batch that the first step reads is not loaded",
        _EXECUTOR,
        "for number, index in numbered if number >= first_step)",
        "for number, index in numbered if number > first_step)",
        (_TEST_EXECUTOR, "-k", "batch"),
    ),
    Mutant(
        "real: executor",
        "two loads of a step load the same batch",
        _EXECUTOR,
        "int(self._before_step[instance.step]) + places.index(instance.position)",
        "int(self._before_step[instance.step])",
        (_TEST_EXECUTOR, "-k", "batch"),
    ),
    Mutant(
        "real: executor",
        "a backward pass leaves out its first bucket",
        _EXECUTOR,
        "[first.position :]",
        "[first.position + 1 :]",
        (_TEST_EXECUTOR, "-k", "bucket"),
    ),
    Mutant(
        "real: executor",
        "a delay is that of the step before",
        _EXECUTOR,
        "self._delays_s[op.channel][step]",
        "self._delays_s[op.channel][step - 1]",
        (_TEST_EXECUTOR, "-k", "own_seconds"),
    ),
    Mutant(
        "real: executor",
        "the watch is not told how far the collectives are",
        _EXECUTOR,
        'if instance.stream == "comm":',
        'if instance.stream == "io":',
        (_TEST_EXECUTOR, "-k", "watch"),
    ),
    Mutant(
        "real: clocks",
        "times are gathered without the drift of their clocks",
        _RECORDER,
        "drift=drift(clocks, rank)",
        "drift=0.0",
        _TEST_CLOCK,
    ),
    Mutant(
        "real: clocks",
        "a clock that loses is taken for one that gains",
        _CLOCK,
        "return float(clocks[1].ahead_s[rank] - clocks[0].ahead_s[rank]) / passed_s",
        "return abs(float(clocks[1].ahead_s[rank] - clocks[0].ahead_s[rank])) / passed_s",
        _TEST_CLOCK,
    ),
    Mutant(
        "real: clocks",
        "the drift of a clock is noticed only if it gains",
        _CLOCK,
        "return np.asarray((times_s - start_s) * (1 - drift))",
        "return np.asarray((times_s - start_s) * (1 - max(drift, 0.0)))",
        _TEST_CLOCK,
    ),
    Mutant(
        "real: clocks",
        "the slowest answer is believed",
        _CLOCK,
        "uncertainty_s, ahead_s = min(answers)",
        "uncertainty_s, ahead_s = max(answers)",
        _TEST_CLOCK,
    ),
    Mutant(
        "real: clocks",
        "an answer is dated when it was asked for",
        _CLOCK,
        "float(reply) - (sent_s + back_s) / 2",
        "float(reply) - sent_s",
        _TEST_CLOCK,
    ),
    Mutant(
        "real: clocks",
        "the common start is early by what a clock is ahead",
        _CLOCK,
        "start_s = float(at_s) + float(clocks",
        "start_s = float(at_s) - float(clocks",
        _TEST_CLOCK,
    ),
    Mutant(
        "real: clocks",
        "a collective begins with its first member",
        _RECORDER,
        "np.fmax.reduce(members_s",
        "np.fmin.reduce(members_s",
        _TEST_CLOCK,
    ),
    Mutant(
        "real: clocks",
        "all ranks get the times of the last one",
        _RECORDER,
        "times_s[:, :, other] = theirs.numpy()",
        "times_s[:, :, 1:] = theirs.numpy()[:, :, np.newaxis]",
        _TEST_CLOCK,
    ),
    Mutant(
        "real: checkpoints",
        "contents that have changed are taken",
        _CHECKPOINT,
        "if changed or missing or",
        "if missing or",
        (_TEST_CHECKPOINT, "-k", "every_cut"),
    ),
    Mutant(
        "real: checkpoints",
        "an unfinished file takes the place of the old one",
        "simdist/files.py",
        'part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")',
        "part = path",
        (_TEST_CHECKPOINT, "-k", "interruption_while"),
    ),
    Mutant(
        "real: checkpoints",
        "the oldest checkpoint is resumed",
        _CHECKPOINT,
        'self._folder.glob("step-*.ckpt"), reverse=True)',
        'self._folder.glob("step-*.ckpt"))',
        (_TEST_CHECKPOINT, "-k", "damaged_checkpoint_is_left or kept_beside"),
    ),
    Mutant(
        "real: checkpoints",
        "a checkpoint of another job is resumed",
        _CHECKPOINT,
        "if index.job != self._job:",
        "if index.job.world_size != self._job.world_size:",
        (_TEST_CHECKPOINT, "-k", "another_job"),
    ),
    Mutant(
        "real: checkpoints",
        "what a step hands on to the next is not saved",
        _STATES,
        "for name in ops.reads(op) if name not in written)",
        "for name in ops.reads(op) if name in written)",
        (_TEST_CHECKPOINT, "-k", "residuals"),
    ),
    Mutant(
        "real: top-k",
        "the largest are those that are most positive",
        _TOPK,
        "torch.topk(values.abs(), k",
        "torch.topk(values, k",
        _TEST_TOPK,
    ),
    Mutant(
        "real: top-k",
        "a scatter adds to what was there",
        _TOPK,
        "out.zero_().index_add_(0, indices, values)",
        "out.index_add_(0, indices, values)",
        _TEST_TOPK,
    ),
    Mutant(
        "real: top-k",
        "the first that reach the threshold are taken, not the largest",
        _TOPK,
        "return candidates[torch.topk(magnitudes, k, sorted=False).indices]",
        "return candidates[:k]",
        _TEST_TOPK,
    ),
    Mutant(
        "real: top-k",
        "fewer candidates than k are enough",
        _TOPK,
        "if candidates.numel() < k:",
        "if candidates.numel() < 1:",
        _TEST_TOPK,
    ),
    Mutant(
        "real: top-k",
        "k may be one more than there are",
        _TOPK,
        "if not 0 <= k <= values.numel():",
        "if not 0 <= k <= values.numel() + 1:",
        _TEST_TOPK,
    ),
    Mutant(
        "real: top-k",
        "a threshold that exactly k reach is too low",
        "real/kernels/mstopk.py",
        "is_upper = (entries >= threshold).sum() <= k",
        "is_upper = (entries >= threshold).sum() < k",
        _TEST_TOPK,
        equivalent="where exactly k reach a threshold, all of them are taken, be they above the bracket or in it",
    ),
    Mutant(
        "real: collectives",
        "a server adds itself up first",
        "real/collectives/servers.py",
        "addends = [*arrived[: self.me], mine, *arrived[self.me + 1 :]]",
        "addends = [mine, *arrived[: self.me], *arrived[self.me + 1 :]]",
        (_TEST_VALUES, "-k", "servers_add_up"),
    ),
    Mutant(
        "real: collectives",
        "a server adds up the first member twice",
        "real/collectives/servers.py",
        "for addend in addends[1:]:",
        "for addend in addends:",
        (_TEST_VALUES, "-k", "servers_add_up"),
    ),
    Mutant(
        "real: collectives",
        "pieces beyond the smallest part are not sent",
        "real/collectives/servers.py",
        "range(0, max(part.numel() for part in self.parts), count)",
        "range(0, min(part.numel() for part in self.parts), count)",
        (_TEST_VALUES, "-k", "servers_add_up"),
    ),
    Mutant(
        "real: collectives",
        "a reduce-scatter leaves the first slice with everybody",
        "real/collectives/worlds.py",
        "[members.ranks.index(self.rank)]",
        "[0]",
        (_TEST_VALUES, "-k", "collectives_leave_what_numpy_says_in_both_worlds"),
    ),
    Mutant(
        "real: collectives",
        "who is no root of a reduce loses what it had",
        "real/collectives/worlds.py",
        "buffer if self.rank == root else self._like(buffer))",
        "buffer)",
        (_TEST_VALUES, "-k", "collectives_leave_what_numpy_says_in_both_worlds"),
    ),
)

MUTANTS = (
    *_PLAN,
    *_ENGINES,
    *_NETWORK,
    *_COST,
    *_SCHEDULES,
    *_CACHING,
    *_PROOF,
    *_SCENARIO,
    *_PROFILES,
    *_WHATIF,
    *_STUDIES,
    *_REAL,
)
