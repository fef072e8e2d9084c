# cython: language_level=3, boundscheck=False, wraparound=False
# distutils: language = c++
"""Thin binding of the compiled core. Arrays are checked for type and size here, and nothing else."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

import numpy as np

cdef extern from *:
    """
    static inline long long wide_high(__int128 x) { return static_cast<long long>(x >> 62); }
    static inline long long wide_low(__int128 x) {
      return static_cast<long long>(x & ((static_cast<__int128>(1) << 62) - 1));
    }
    """
    ctypedef int wide "__int128"
    long long wide_high(wide x) nogil
    long long wide_low(wide x) nogil

cdef extern from "kernel.hpp" namespace "envplan" nogil:
    const int64_t kInfinite
    cdef struct Network:
        int32_t num_nodes, num_arcs
        const int32_t* tail
        const int32_t* head
        const int32_t* curve
        int32_t num_curves
        const int32_t* curve_begin
        const int64_t* duration
        const int64_t* limit
        int32_t source, sink
    cdef cppclass CppWalk "envplan::Walk":
        CppWalk(const Network&) except +
        void start(const int64_t*, int64_t, cbool) except +
        int64_t time()
        int64_t min_time()
        int64_t max_time()
        int64_t flow()
        wide cost()
        void event_times(int64_t*) except +
        void arc_flows(int64_t*)
    cdef cppclass CppTrace "envplan::Trace":
        CppTrace(const CppWalk&, int64_t) except +
        cbool run(uint64_t, int64_t) except +
        const CppWalk& walk()
        const vector[int64_t]& times()
        const vector[int64_t]& flows()
        const vector[wide]& costs()
        const CppWalk& at(int64_t) except +

cdef extern from "rounding.hpp" namespace "envplan" nogil:
    cdef struct RoundingProblem:
        int32_t num_operations
        const int32_t* pred_begin
        const int32_t* pred
        const int64_t* pred_lag
        const int32_t* table
        const int32_t* option_begin
        const int64_t* time
        const int64_t* cost
        const int64_t* finish
        int64_t deadline
    void cpp_round "envplan::round_to_options"(const RoundingProblem&, int32_t*) except +
    cbool cpp_improve "envplan::improve_options"(
        const RoundingProblem&, int64_t, double, uint64_t, int32_t*) except +

cdef extern from "switching.hpp" namespace "envplan" nogil:
    cdef struct SwitchingProblem:
        int32_t num_operations, num_stages, num_tables, num_clocks
        const int32_t* pred_begin
        const int32_t* pred
        const int64_t* pred_lag
        const int32_t* stage
        const int32_t* table
        const int32_t* option_begin
        const int64_t* time
        const double* energy
        const int32_t* clock
        const int32_t* nearest
        const double* blocking_power
        int64_t latency, dwell, deadline
        double late_price
    cdef struct SwitchingReplay:
        int64_t makespan
        double energy
        int64_t too_soon
    SwitchingReplay replay_switching(const SwitchingProblem&, const int32_t*, int64_t*) except +
    void choose_constant(const SwitchingProblem&, cbool, int32_t*) except +
    cbool improve_switching(
        const SwitchingProblem&, int64_t, double, uint64_t, int32_t*) except +

cdef extern from "maxflow.hpp" namespace "envplan::maxflow" nogil:
    const int64_t kUnlimited "envplan::maxflow::kInfinite"
    cdef enum class Status(int):
        kOptimal
        kInfeasible
        kUnbounded
    cdef struct Result:
        Status status
        int64_t value
    Result solve(int32_t, int32_t, const int32_t*, const int32_t*, const int64_t*, const int64_t*,
                 int32_t, int32_t, int64_t*, uint8_t*) except +

INFINITE = kInfinite
UNLIMITED = kUnlimited

cdef uint64_t WORK_BETWEEN_SIGNALS = 1_000_000  # touched nodes: a few hundredths of a second


cdef object _int_from_wide(wide x):
    return (<object>wide_high(x) << 62) + <object>wide_low(x)


cdef class Trace:
    """The walk from the start flow to T_min over one activity network.

    Args:
        num_nodes: number of events.
        tail, head, curve: int32 (arcs,), events that each activity joins and its curve.
        curve_begin: int32 (curves + 1,), first level of each curve.
        duration: int64 (levels,), ns, strictly decreasing within a curve.
        limit: int64 (levels,), uW, strictly increasing within a curve, INFINITE at its end.
        source, sink: the events where everything starts and ends.

    Raises:
        ValueError: the network is not one (cycle, several sources, numbers out of range).
        OverflowError: a marginal cost outgrew the integer range.
    """

    cdef CppWalk* _walk
    cdef CppTrace* _trace
    cdef readonly int num_nodes, num_arcs

    def __cinit__(
        self, int num_nodes, const int32_t[::1] tail, const int32_t[::1] head,
        const int32_t[::1] curve, const int32_t[::1] curve_begin, const int64_t[::1] duration,
        const int64_t[::1] limit, int source, int sink,
    ):
        cdef Network net
        if not (tail.shape[0] == head.shape[0] == curve.shape[0] > 0):
            raise ValueError("tail, head and curve must have one entry an arc")
        if curve_begin.shape[0] < 2 or curve_begin[0] != 0 or not (
            curve_begin[curve_begin.shape[0] - 1] == duration.shape[0] == limit.shape[0] > 0
        ):
            raise ValueError("curve_begin must span duration and limit")
        if not (0 <= source < num_nodes and 0 <= sink < num_nodes):
            raise ValueError("source and sink must be nodes")
        self.num_nodes = num_nodes
        self.num_arcs = <int>tail.shape[0]
        net.num_nodes = num_nodes
        net.num_arcs = self.num_arcs
        net.tail = &tail[0]
        net.head = &head[0]
        net.curve = &curve[0]
        net.num_curves = <int32_t>(curve_begin.shape[0] - 1)
        net.curve_begin = &curve_begin[0]
        net.duration = &duration[0]
        net.limit = &limit[0]
        net.source = source
        net.sink = sink
        self._walk = new CppWalk(net)

    def __dealloc__(self):
        del self._trace
        del self._walk

    @property
    def min_time(self):
        """T_min, ns: the longest path with every activity at its fastest."""
        return self._walk.min_time()

    @property
    def max_time(self):
        """T_max, ns: the longest path with every activity at its slowest."""
        return self._walk.max_time()

    def start(self, const int64_t[::1] guess, int64_t flow, cbool rough):
        """Jump to the least cost at flow value `flow` (uW), from a guessed flow int64 (arcs,).

        The result does not depend on the guess, nor on whether it is said to be `rough`.
        """
        if guess.shape[0] != self.num_arcs:
            raise ValueError("guess must have one entry an arc")
        if flow < 0 or flow >= kInfinite // 4 or (
            len(guess) and (np.min(guess) < 0 or np.max(guess) >= kInfinite // 4)
        ):
            raise ValueError("flow is out of range")
        with nogil:
            self._walk.start(&guess[0], flow, rough)

    def state(self):
        """The optimum where the walk stands before run(): as state_at."""
        return self._state(self._walk)

    def run(self, int64_t from_flow=-1, progress=None, int64_t until=0):
        """Walk to T_min, recording from the first breakpoint with flow above `from_flow` (uW).

        Args:
            until: end the walk at this time, ns, or at the first breakpoint recorded if it is later.
            progress: called now and then with (time now, T_min), ns. Ctrl-C is honoured as often.
        """
        cdef cbool more = True
        del self._trace
        self._trace = NULL
        self._trace = new CppTrace(self._walk[0], from_flow)
        while more:
            with nogil:
                more = self._trace.run(WORK_BETWEEN_SIGNALS, until)
            if progress is not None:
                progress(self._trace.walk().time(), self._walk.min_time())
            _handle_signals()

    def breakpoints(self):
        """(times, slopes, costs) by descending time: int64 ns, int64 uW below each, ints of fJ.

        Costs count from every activity at its slowest.
        """
        if self._trace == NULL:
            raise RuntimeError("run() comes first")
        cdef size_t k, n = self._trace.times().size()
        times = np.empty(n, np.int64)
        slopes = np.empty(n, np.int64)
        cdef int64_t[::1] t = times
        cdef int64_t[::1] s = slopes
        costs = []
        for k in range(n):
            t[k] = self._trace.times()[k]
            s[k] = self._trace.flows()[k]
            costs.append(_int_from_wide(self._trace.costs()[k]))
        return times, slopes, costs

    def state_at(self, int64_t time):
        """The optimum at `time` ns: (event times, flows).

        Of all optimal event times those with every event as early as can be, int64 (nodes,), ns;
        and the flow on each arc, int64 (arcs,), uW.

        Raises:
            IndexError: time lies outside the recorded breakpoints.
        """
        if self._trace == NULL:
            raise RuntimeError("run() comes first")
        return self._state(&self._trace.at(time))

    cdef _state(self, const CppWalk* walk):
        times = np.empty(self.num_nodes, np.int64)
        flows = np.empty(self.num_arcs, np.int64)
        cdef int64_t[::1] t = times
        cdef int64_t[::1] f = flows
        walk.event_times(&t[0])
        walk.arc_flows(&f[0])
        return times, flows


cdef class Rounding:
    """Chooses one option for each operation so that a deadline holds; see rounding.hpp.

    Args:
        pred_begin, pred, pred_lag: predecessors as CSR, int32 (operations + 1,), int32 (edges,),
            int64 (edges,) ns. Operations are numbered topologically by relaxed start.
        table: int32 (operations,), the option table of each.
        option_begin: int32 (tables + 1,), first option of each table.
        time, cost: int64 (options,), ns ascending and fJ descending within a table.
        finish: int64 (operations,), ns, relaxed finish times, none after the deadline.
        deadline: ns.
    """

    cdef RoundingProblem _problem
    cdef object _arrays  # keeps what _problem points to alive

    def __cinit__(
        self, const int32_t[::1] pred_begin, const int32_t[::1] pred, const int64_t[::1] pred_lag,
        const int32_t[::1] table, const int32_t[::1] option_begin, const int64_t[::1] time,
        const int64_t[::1] cost, const int64_t[::1] finish, int64_t deadline,
    ):
        self._arrays = (pred_begin, pred, pred_lag, table, option_begin, time, cost, finish)
        self._problem.num_operations = <int32_t>table.shape[0]
        self._problem.pred_begin = &pred_begin[0]
        self._problem.pred = &pred[0] if pred.shape[0] else NULL
        self._problem.pred_lag = &pred_lag[0] if pred_lag.shape[0] else NULL
        self._problem.table = &table[0]
        self._problem.option_begin = &option_begin[0]
        self._problem.time = &time[0]
        self._problem.cost = &cost[0]
        self._problem.finish = &finish[0]
        self._problem.deadline = deadline

    def round(self):
        """Diffusion and exchange: int32 (operations,), options as indices within their tables."""
        out = np.empty(self._problem.num_operations, np.int32)
        cdef int32_t[::1] choice = out
        with nogil:
            cpp_round(self._problem, &choice[0])
        return out

    def improve(self, int32_t[::1] choice, int64_t moves, double heat, uint64_t seed):
        """Anneal `choice` in place from a temperature `heat`; returns whether it got cheaper."""
        cdef cbool better
        if choice.shape[0] != self._problem.num_operations:
            raise ValueError("choice must have one entry an operation")
        with nogil:
            better = cpp_improve(self._problem, moves, heat, seed, &choice[0])
        return better


cdef class Switching:
    """Chooses one option for each operation where clocks follow late; see switching.hpp.

    Args:
        pred_begin, pred, pred_lag: predecessors as CSR, int32 (operations + 1,), int32 (edges,),
            int64 (edges,) ns. Operations are numbered topologically by start.
        stage, table: int32 (operations,), the stage and the option table of each.
        option_begin: int32 (tables + 1,), first option of each table.
        time, energy: int64 (options,), ns, ascending within a table; float64 (options,), fJ.
        clock: int32 (options,), which clock; -1 where an option controls none.
        nearest: int32 (options, clocks), the option that stands for each at each clock.
        blocking_power: float64 (stages,), uW.
        latency, dwell, deadline: ns.
        late_price: uW, what a ns after the deadline costs at first.
    """

    cdef SwitchingProblem _problem
    cdef object _arrays  # keeps what _problem points to alive

    def __cinit__(
        self, const int32_t[::1] pred_begin, const int32_t[::1] pred, const int64_t[::1] pred_lag,
        const int32_t[::1] stage, const int32_t[::1] table, const int32_t[::1] option_begin,
        const int64_t[::1] time, const double[::1] energy, const int32_t[::1] clock,
        const int32_t[:, ::1] nearest, const double[::1] blocking_power, int64_t latency,
        int64_t dwell, int64_t deadline, double late_price,
    ):
        self._arrays = (pred_begin, pred, pred_lag, stage, table, option_begin, time, energy,
                        clock, nearest, blocking_power)
        self._problem.num_operations = <int32_t>table.shape[0]
        self._problem.num_stages = <int32_t>blocking_power.shape[0]
        self._problem.num_tables = <int32_t>(option_begin.shape[0] - 1)
        self._problem.num_clocks = <int32_t>nearest.shape[1]
        self._problem.pred_begin = &pred_begin[0]
        self._problem.pred = &pred[0] if pred.shape[0] else NULL
        self._problem.pred_lag = &pred_lag[0] if pred_lag.shape[0] else NULL
        self._problem.stage = &stage[0]
        self._problem.table = &table[0]
        self._problem.option_begin = &option_begin[0]
        self._problem.time = &time[0]
        self._problem.energy = &energy[0]
        self._problem.clock = &clock[0]
        self._problem.nearest = &nearest[0, 0] if nearest.shape[1] else NULL
        self._problem.blocking_power = &blocking_power[0]
        self._problem.latency = latency
        self._problem.dwell = dwell
        self._problem.deadline = deadline
        self._problem.late_price = late_price

    def replay(self, const int32_t[::1] choice):
        """(makespan ns, energy fJ, ns by which clocks last too short) of options, by operation."""
        cdef SwitchingReplay result
        self._check(choice.shape[0])
        with nogil:
            result = replay_switching(self._problem, &choice[0], NULL)
        return result.makespan, result.energy, result.too_soon

    def constant(self, cbool by_table):
        """The best options found with one clock a stage, or one option a stage and table."""
        out = np.empty(self._problem.num_operations, np.int32)
        cdef int32_t[::1] choice = out
        with nogil:
            choose_constant(self._problem, by_table, &choice[0])
        return out

    def improve(self, int32_t[::1] choice, int64_t moves, double heat, uint64_t seed):
        """Anneal `choice` in place; returns whether it has changed, which is for the better."""
        cdef cbool changed
        self._check(choice.shape[0])
        with nogil:
            changed = improve_switching(self._problem, moves, heat, seed, &choice[0])
        return changed

    def _check(self, Py_ssize_t size):
        if size != self._problem.num_operations:
            raise ValueError("choice must have one entry an operation")


def max_flow(
    int num_nodes, const int32_t[::1] tail, const int32_t[::1] head, const int64_t[::1] lower,
    const int64_t[::1] upper, int source, int sink,
):
    """Maximum flow with lower bounds on a plain graph; see maxflow.hpp.

    Returns:
        (status, value, flow int64 (arcs,), source side uint8 (nodes,)); status is "optimal",
        "infeasible" or "unbounded".

    Raises:
        ValueError: an index or a bound is wrong.
        OverflowError: the bounds add up to more than the integer range.
    """
    cdef Py_ssize_t arcs = tail.shape[0]
    if not (arcs == head.shape[0] == lower.shape[0] == upper.shape[0]):
        raise ValueError("tail, head, lower and upper must have one entry an arc")
    flow = np.zeros(arcs + 1, np.int64)
    side = np.zeros(max(num_nodes, 1), np.uint8)
    cdef int64_t[::1] f = flow
    cdef uint8_t[::1] s = side
    cdef const int32_t* t = &tail[0] if arcs else NULL
    cdef const int32_t* h = &head[0] if arcs else NULL
    cdef const int64_t* lo = &lower[0] if arcs else NULL
    cdef const int64_t* up = &upper[0] if arcs else NULL
    cdef Result result
    with nogil:
        result = solve(num_nodes, <int32_t>arcs, t, h, lo, up, source, sink, &f[0], &s[0])
    status = {
        Status.kOptimal: "optimal", Status.kInfeasible: "infeasible", Status.kUnbounded: "unbounded"
    }[result.status]
    return status, result.value, flow[:arcs], side


cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1


cdef int _handle_signals() except -1:
    return PyErr_CheckSignals()
