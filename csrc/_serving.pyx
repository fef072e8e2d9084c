# cython: language_level=3, boundscheck=False, wraparound=False
# distutils: language = c++
"""Thin binding of serving/replay.hpp, which says what happens and checks what numbers say.

Types and the lengths of the requests' arrays are checked here.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

import numpy as np

cdef extern from "serving/replay.hpp" namespace "envplan::serving" nogil:
    cdef cppclass TimeCounts:
        @staticmethod
        vector[double] ends()
        const vector[int64_t]& counts()
    cdef struct Tables:
        double idle_w, grid, context_s, context_w
        vector[double] step_s, step_w, prompt_s, prompt_w
    cdef struct Size:
        int32_t chunk
        double kv_tokens, link_bytes_s
        vector[int32_t] tables
    cdef struct Requests:
        int64_t count
        const double* arrival
        const int32_t* input
        const int32_t* output
        const uint8_t* known
        const uint8_t* taken
        const int32_t* expected
    cdef struct Slo:
        double ttft_s, tbt_s
    cdef struct Need:
        double instances, busy, decoding, hopeless
    cdef cppclass CppService "envplan::serving::Service":
        CppService(
            Requests, vector[Tables], vector[Size], vector[Slo], vector[double], double
        ) except +
        vector[Slo] slos
        vector[int64_t] counts(double, double) except +
        Need required_instances(double, double, uint64_t, int32_t, double) except +
    cdef enum class Policy(uint8_t):
        kEdf, kFcfs
    cdef struct TransferCosts:
        double latency_s, bytes_per_token
    cdef cppclass Transfers:
        int64_t count()
        double bytes()
    cdef struct Options:
        double clock_delay_s, clock_hold_s, clock_margin, pack_share, squash_s, slot_s, end_s
        Policy scheduler
        TransferCosts transfers
    cdef struct Counts:
        int64_t requests, first_in_time, tokens_in_time, attained, unservable
    cdef enum class Phase(uint8_t):
        kStarting, kIdle, kStepping, kPrompts, kGone
    cdef cppclass Batch:
        size_t size()
    cdef cppclass Instance:
        int32_t pool, size, clock
        cbool leaving
        Phase phase
        Batch batch
    cdef cppclass SlotSeries:
        const vector[double]& energy()
        const vector[int64_t]& attained()
    cdef cppclass Tally:
        const vector[Counts]& counts()
        const vector[TimeCounts]& first_token_times()
        const vector[TimeCounts]& token_intervals()
    cdef cppclass CppReplay "envplan::serving::Replay":
        CppReplay(const CppService&, Options) except +
        int32_t start(int32_t, int32_t, int32_t, cbool, double) except +
        void retire(int32_t) except +
        void move(int32_t, int32_t, int32_t, cbool) except +
        void route(int32_t, int32_t, vector[int32_t]) except +
        void set_pack(int32_t, cbool) except +
        void hand_over(int32_t, int32_t) except +
        void advance(double) except +
        void finish() except +
        const vector[Instance]& instances()
        const SlotSeries& series()
        const vector[double]& pool_energy()
        const Tally& tally()
        int64_t clock_changes()
        int64_t helped()
        int64_t squashed()
        int64_t too_long()
        int64_t preempted()
        const Transfers& transfers()

_POLICIES = {"edf": Policy.kEdf, "fcfs": Policy.kFcfs}


cdef vector[double] _numbers(values) except *:
    """Numbers as C++ has them, without a Python object for each."""
    cdef const double[::1] numbers = np.ascontiguousarray(values, dtype=np.float64)
    cdef vector[double] copied
    if numbers.shape[0]:
        copied.assign(&numbers[0], &numbers[0] + numbers.shape[0])
    return copied


def time_bin_ends():
    """The longest time in each bin of Replay.times, s, float64 (bins,); the last is infinite."""
    return np.array(TimeCounts.ends(), dtype=np.float64)


cdef class Service:
    """What is served, by which instances, within which SLOs; see serving/service.hpp.

    Args:
        arrival: float64 (n,), s, ascending.
        input, output: int32 (n,), tokens.
        known, taken: uint8 (n,), class, and class it is taken for on arrival.
        tables: of each configuration (idle_w, step_s, step_w, grid, prompt_s, prompt_w, context_s,
            context_w).
        sizes: of each instance size (kv_tokens, chunk, tables, link_bytes_s).
        slos: of each class (ttft_s, tbt_s), at most 64.
        usual_output: tokens that outputs of each class have as far as is known beforehand.
        expected: int32 (n,), tokens that the output of each request is expected to have, or None:
            the mean of those of its class that have finished.
        max_context: tokens of the longest request that is served.
    """

    cdef CppService* service
    cdef object borrowed

    def __cinit__(
        self, const double[::1] arrival not None, const int32_t[::1] input not None,
        const int32_t[::1] output not None, const uint8_t[::1] known not None,
        const uint8_t[::1] taken not None, tables, sizes, slos, usual_output,
        const int32_t[::1] expected=None, double max_context=1e300,
    ):
        cdef int64_t count = arrival.shape[0]
        if expected is not None and expected.shape[0] != count:
            raise ValueError("expected outputs must be of one length with the requests")
        if count == 0 or not count == input.shape[0] == output.shape[0] == known.shape[0] == taken.shape[0]:
            raise ValueError("requests must be there, and their arrays of one length")
        self.borrowed = (arrival, input, output, known, taken, expected)
        cdef Requests requests
        requests.count, requests.arrival = count, &arrival[0]
        requests.input, requests.output = &input[0], &output[0]
        requests.known, requests.taken = &known[0], &taken[0]
        requests.expected = NULL
        if expected is not None:
            requests.expected = &expected[0]
        cdef vector[Tables] all_tables
        cdef vector[Size] all_sizes
        cdef vector[Slo] all_slos
        cdef Tables table
        cdef Size size
        for idle_w, step_s, step_w, grid, prompt_s, prompt_w, context_s, context_w in tables:
            table.context_s, table.context_w = context_s, context_w
            table.idle_w, table.grid = idle_w, grid
            table.step_s, table.step_w = _numbers(step_s), _numbers(step_w)
            table.prompt_s, table.prompt_w = _numbers(prompt_s), _numbers(prompt_w)
            all_tables.push_back(table)
        for kv_tokens, chunk, places, link_bytes_s in sizes:
            size.kv_tokens, size.chunk, size.link_bytes_s = kv_tokens, chunk, link_bytes_s
            size.tables = places
            all_sizes.push_back(size)
        for ttft_s, tbt_s in slos:
            all_slos.push_back(Slo(ttft_s, tbt_s))
        self.service = new CppService(
            requests, all_tables, all_sizes, all_slos, usual_output, max_context
        )

    def __dealloc__(self):
        del self.service

    def counts(self, double begin_s, double end_s):
        """Requests by the class they are taken for that arrive in a stretch."""
        return self.service.counts(begin_s, end_s)

    def need(self, double begin_s, double end_s, uint64_t classes, int32_t size, double late):
        """What classes (a bit for each) need of a size: the fields of Need."""
        cdef Need need
        with nogil:
            need = self.service.required_instances(begin_s, end_s, classes, size, late)
        return need.instances, need.busy, need.decoding, need.hopeless


cdef class Replay:
    """A fleet that serves requests; see serving/replay.hpp.

    Args:
        service: what is served.
        clock_delay_s, clock_hold_s, clock_margin, pack_share, squash_s, slot_s, end_s: as in
            Options.
        scheduler: "edf" or "fcfs".
        transfer_s: from the instances that run prompts to those that decode, s, and
        kv_bytes_per_token: of context.
    """

    cdef CppReplay* replay
    cdef object borrowed

    def __cinit__(
        self, Service service not None, double clock_delay_s, double clock_hold_s, double clock_margin,
        double pack_share, double squash_s, double slot_s, double end_s, scheduler="edf",
        double transfer_s=0.0, double kv_bytes_per_token=0.0,
    ):
        self.borrowed = service
        cdef Options options = Options(
            clock_delay_s, clock_hold_s, clock_margin, pack_share, squash_s, slot_s, end_s,
            _POLICIES[scheduler], TransferCosts(transfer_s, kv_bytes_per_token),
        )
        self.replay = new CppReplay(service.service[0], options)

    def __dealloc__(self):
        del self.replay

    def start(self, int32_t pool, int32_t size, int32_t clock, cbool managed, double ready_at):
        """Number of a new instance; clock is a place among its size's."""
        return self.replay.start(pool, size, clock, managed, ready_at)

    def retire(self, int32_t instance):
        """Take an instance out; it finishes what it has."""
        self.replay.retire(instance)

    def move(self, int32_t instance, int32_t pool, int32_t clock, cbool managed):
        """Let an instance serve another pool, or at another clock."""
        self.replay.move(instance, pool, clock, managed)

    def route(self, int32_t klass, int32_t pool, helpers):
        """Send a class to a pool; `helpers`, pools, take what would be late there."""
        self.replay.route(klass, pool, helpers)

    def set_pack(self, int32_t pool, cbool pack):
        """Whether a pool fills one instance after another instead of spreading requests."""
        self.replay.set_pack(pool, pack)

    def hand_over(self, int32_t pool, int32_t decode_pool):
        """Let the instances of a pool run prompts only; requests decode in another pool."""
        self.replay.hand_over(pool, decode_pool)

    def advance(self, double until):
        """Let everything happen that happens before a time, s."""
        with nogil:
            self.replay.advance(until)

    def finish(self):
        """Serve what is left."""
        with nogil:
            self.replay.finish()

    def instances(self):
        """[(number, pool, size, clock, starting, requests inside)], without those that leave."""
        cdef size_t k
        present = []
        for k in range(self.replay.instances().size()):
            phase = self.replay.instances()[k].phase
            if phase != Phase.kGone and not self.replay.instances()[k].leaving:
                present.append((
                    k, self.replay.instances()[k].pool, self.replay.instances()[k].size,
                    self.replay.instances()[k].clock, phase == Phase.kStarting,
                    self.replay.instances()[k].batch.size(),
                ))
        return present

    def gpus(self):
        """GPUs by instance size that are in use: serving, starting or leaving."""
        cdef size_t k
        counts = {}
        for k in range(self.replay.instances().size()):
            if self.replay.instances()[k].phase != Phase.kGone:
                size = self.replay.instances()[k].size
                counts[size] = counts.get(size, 0) + 1
        return counts

    def times(self):
        """Counts of times to the first token, and between further ones; see time_bin_ends.

        Returns:
            Two arrays, int64 (classes, bins).
        """
        cdef size_t klass, k
        cdef size_t classes = self.replay.tally().counts().size()
        cdef size_t bins = TimeCounts.ends().size()
        first_tokens = np.empty((classes, bins), dtype=np.int64)
        intervals = np.empty((classes, bins), dtype=np.int64)
        cdef int64_t[:, ::1] first_token_counts = first_tokens
        cdef int64_t[:, ::1] interval_counts = intervals
        for klass in range(classes):
            for k in range(bins):
                first_token_counts[klass, k] = (
                    self.replay.tally().first_token_times()[klass].counts()[k]
                )
                interval_counts[klass, k] = self.replay.tally().token_intervals()[klass].counts()[k]
        return first_tokens, intervals

    def apart(self):
        """What does not count as served: too long; unservable, by class; preempted; and transfers.

        Returns:
            Requests longer than the model takes, which count nowhere else; of the requests that
            count, by class, those longer than their instance's memory; how often requests were
            preempted; contexts that were sent from instance to instance, and their bytes.
        """
        cdef size_t k
        unservable = [
            self.replay.tally().counts()[k].unservable
            for k in range(self.replay.tally().counts().size())
        ]
        return (
            self.replay.too_long(), unservable, self.replay.preempted(),
            self.replay.transfers().count(), self.replay.transfers().bytes(),
        )

    def pool_energy(self):
        """Energy of the instances of each pool, J, by its number."""
        return np.array(self.replay.pool_energy(), dtype=np.float64)

    def results(self):
        """Energy (J) and attained requests by slot; counts by class; clock changes; helped; squashed."""
        return (
            np.array(self.replay.series().energy(), dtype=np.float64),
            np.array(self.replay.series().attained(), dtype=np.int64),
            self.counts(),
            self.replay.clock_changes(), self.replay.helped(), self.replay.squashed(),
        )

    def counts(self):
        """Requests that are over, and met first tokens, further tokens and both: int64 (classes, 4)."""
        cdef size_t k
        cdef Counts counts
        by_class = []
        for k in range(self.replay.tally().counts().size()):
            counts = self.replay.tally().counts()[k]
            by_class.append([counts.requests, counts.first_in_time, counts.tokens_in_time, counts.attained])
        return np.array(by_class, dtype=np.int64)
