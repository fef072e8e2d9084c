# cython: language_level=3, boundscheck=False, wraparound=False
# distutils: language = c++
"""Thin binding of the compiled core. Arrays are checked for type and size here, and nothing else."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.vector cimport vector

from contextvars import ContextVar
from typing import NamedTuple

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
        int32_t num_levels
        const int64_t* duration
        const int64_t* slope
        int32_t source, sink
    cdef cppclass CppFlow "envplan::ParametricFlow":
        CppFlow(const Network&) except +
        void solve_at_flow(const int64_t*, const int64_t*, cbool, int64_t) except +
        void solve_at_time(const int64_t*, const int64_t*, int64_t) except +
        int64_t time()
        int64_t min_time()
        int64_t max_time()
        wide cost()
        void event_times(int64_t*) except +
        void arc_flows(int64_t*)
    cdef struct ShiftedArc "envplan::ParametricFlow::ShiftedArc":
        int32_t arc, later

cdef extern from "frontier_trace.hpp" namespace "envplan" nogil:
    cdef cppclass CppTrace "envplan::FrontierTrace":
        CppTrace(const CppFlow&, int64_t) except +
        cbool extend(uint64_t, int64_t) except +
        int64_t start_time()
        const CppFlow& walk()
        const vector[int64_t]& times()
        const vector[int64_t]& flows()
        const vector[wide]& costs()
        void watch(const vector[ShiftedArc]&) except +
        const vector[int64_t]& periods()
        const CppFlow& optimum_at(int64_t) except +

cdef extern from "rounding.hpp" namespace "envplan" nogil:
    cdef struct RoundingProblem:
        int32_t num_operations, num_preds, num_tables, num_options
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

cdef extern from "replay.hpp" namespace "envplan" nogil:
    cdef struct ProblemArrays:
        int32_t num_operations, num_stages, num_tables, num_rows, num_clocks, num_arcs, num_slices
        const int32_t* order
        const int32_t* stage_begin
        const int32_t* succ_begin
        const int32_t* succ
        const int64_t* succ_lag
        const int32_t* table
        const int32_t* table_begin
        const int64_t* time
        const int64_t* energy
        const int32_t* clock
        const int32_t* leaves
        const int32_t* nearest
        const int64_t* waiting
        const int32_t* slice_begin
        const int64_t* slice_time
        const int64_t* slice_power
    cdef struct CppMachine "envplan::Machine":
        int64_t latency
        cbool asks_ahead
    cdef struct Part:
        int32_t row, clock
        int64_t begin, end, energy
    cdef cppclass CppProblem "envplan::Problem":
        CppProblem(const ProblemArrays&) except +
        vector[int32_t] order, number_of, stage_begin
    cdef cppclass CppReplay "envplan::Replay":
        CppReplay(const CppProblem&, CppMachine, int64_t) except +
        void choose(const int32_t*) except +
        void run(const double*) except +
        cbool makes_request(int32_t)
        int64_t request_time(int32_t)
        int64_t makespan()
        wide energy_until(int64_t)
        int64_t start(int32_t)
        int64_t finish(int32_t)
        int64_t energy(int32_t) except +
        void parts(int32_t, vector[Part]*) except +
        void power_steps(vector[int64_t]*, vector[int64_t]*) except +
    void cpp_makespans "envplan::makespans"(
        const CppProblem&, const int32_t*, CppMachine, const double*, int64_t, int64_t*) except +

cdef extern from "stage_paths.hpp" namespace "envplan" nogil:
    cdef struct StagePrices:
        int64_t latency, min_dwell
        cbool asks_ahead
        double change
        const double* time_price
        const double* wait_price
    cdef struct StagePath:
        double bound, energy
        int32_t changes
        vector[int32_t] rows
        vector[double] times, waits
    StagePath cpp_cheapest_stage_path "envplan::cheapest_stage_path"(
        const CppProblem&, int32_t, const StagePrices&) except +

cdef extern from "parts.hpp" namespace "envplan" nogil:
    cdef struct PartsProblem:
        int32_t num_parts, num_clocks, num_options
        const int32_t* option_begin
        const int64_t* time
        const int64_t* energy
        const uint8_t* asks
        int64_t latency, min_dwell, waiting, slack
    cdef struct Composed:
        vector[int32_t] options
    vector[Composed] cpp_compose "envplan::compose"(const PartsProblem&, int64_t) except +

cdef extern from "annealing.hpp" namespace "envplan" nogil:
    cdef struct Limits:
        CppMachine machine
        int64_t deadline, min_dwell, peak
        cbool waits
        int64_t price, change_price
        wide allowance
    cdef struct Score:
        wide excess, energy
        int64_t late, shortage
        wide over
        int32_t changes
        wide cost
    Score cpp_score "envplan::score"(
        const CppProblem&, const Limits&, const int32_t*) except +
    cdef cppclass Annealing:
        Annealing(
            const CppProblem&, const Limits&, const int32_t*, int64_t, double, uint64_t,
            cbool) except +
        cbool run(uint64_t) except +
        void best(int32_t*)
    cdef cppclass ConstantClocks:
        ConstantClocks(const CppProblem&, const Limits&) except +
        cbool improve(int32_t) except +
        void best(int32_t*)

INFINITE = kInfinite
# Where a thread finds the event that ends its work: signals reach the main thread only.
STOP = ContextVar("STOP", default=None)

# A few hundredths of a second: nodes touched, or operations replayed.
cdef uint64_t WORK_BETWEEN_SIGNALS = 1_000_000
cdef uint64_t REPLAYS_BETWEEN_SIGNALS = 500_000


cdef object _int_from_wide(wide x):
    return (<object>wide_high(x) << 62) + <object>wide_low(x)


cdef wide _wide_from_int(object x) except? -1:
    return (<wide><int64_t>(x >> 62) << 62) + <int64_t>(x & ((1 << 62) - 1))


class Optimum(NamedTuple):
    """An optimal solution at one point of the frontier, dual and primal.

    Attributes:
        times_ns: of the events, int64 (nodes,): of all optimal ones those with every event as early
            as can be.
        flow_10uw: on the arcs, int64 (arcs,).
    """

    times_ns: object
    flow_10uw: object


class Breakpoints(NamedTuple):
    """Breakpoints of a frontier, the latest first.

    Attributes:
        times_ns: int64 (n,).
        slopes_10uw: what a ns less costs below each, int64 (n,).
        costs_10fj: above every activity at its slowest, (n,); Python's integers.
    """

    times_ns: object
    slopes_10uw: object
    costs_10fj: object


cdef class ParametricFlow:
    """The optimum of an activity network at one time, which moves; see kernel.hpp.

    Args:
        num_nodes: number of events.
        tail, head, curve: int32 (arcs,), events that each activity joins and its curve.
        curve_begin: int32 (curves + 1,), first level of each curve.
        duration: int64 (levels,), ns, strictly decreasing within a curve.
        slope: int64 (levels,), 10 uW, strictly increasing within a curve, INFINITE at its end.
        source, sink: the events where everything starts and ends.

    Raises:
        ValueError: the network is not one (cycle, several sources, numbers out of range).
    """

    cdef CppFlow* _flow
    cdef readonly int num_nodes, num_arcs

    def __cinit__(
        self, int num_nodes, const int32_t[::1] tail not None, const int32_t[::1] head not None,
        const int32_t[::1] curve not None, const int32_t[::1] curve_begin not None,
        const int64_t[::1] duration not None, const int64_t[::1] slope not None, int source,
        int sink,
    ):
        cdef Network net
        if not (tail.shape[0] == head.shape[0] == curve.shape[0] > 0):
            raise ValueError("tail, head and curve must have one entry an arc")
        if curve_begin.shape[0] < 2 or not (duration.shape[0] == slope.shape[0] > 0):
            raise ValueError("there must be levels, each with a duration and a slope")
        self.num_nodes = num_nodes
        self.num_arcs = <int>tail.shape[0]
        net.num_nodes = num_nodes
        net.num_arcs = self.num_arcs
        net.tail = &tail[0]
        net.head = &head[0]
        net.curve = &curve[0]
        net.num_curves = <int32_t>(curve_begin.shape[0] - 1)
        net.curve_begin = &curve_begin[0]
        net.num_levels = <int32_t>duration.shape[0]
        net.duration = &duration[0]
        net.slope = &slope[0]
        net.source = source
        net.sink = sink
        self._flow = new CppFlow(net)

    def __dealloc__(self):
        del self._flow

    @property
    def min_time(self):
        """T_min, ns: the longest path with every activity at its fastest."""
        return self._flow.min_time()

    @property
    def max_time(self):
        """T_max, ns: the longest path with every activity at its slowest."""
        return self._flow.max_time()

    @property
    def time(self):
        """Where it stands, ns: at T_max before anything is solved."""
        return self._flow.time()

    @property
    def cost(self):
        """The cost there, above every activity at its slowest, 10 fJ."""
        return _int_from_wide(self._flow.cost())

    def solve_at_flow(
        self, const int64_t[::1] flow not None, const int64_t[::1] times, int64_t total, *,
        cbool is_rough=False
    ):
        """Jump to the least cost at a flow value from a guess, on which the cost does not depend.

        Args:
            flow: int64 (arcs,), 10 uW.
            times: of the events, int64 (nodes,), ns; None: those that the flow means.
            total: the flow value, 10 uW.
            is_rough: whether the flow is far off, which only makes a difference to the time taken.

        Raises:
            ValueError: arrays have another size, or a flow is out of range.
            OverflowError: what the guess lacks outgrows the integer range.
        """
        self._check_guess(flow, times)
        cdef const int64_t* event_times = &times[0] if times is not None else NULL
        with nogil:
            self._flow.solve_at_flow(&flow[0], event_times, is_rough, total)

    def solve_at_time(
        self, const int64_t[::1] flow not None, const int64_t[::1] times not None, int64_t time
    ):
        """Jump to the least cost at a time, ns, or at T_min or T_max where it is beyond.

        The guess is as for solve_at_flow, and so are the errors.
        """
        self._check_guess(flow, times)
        with nogil:
            self._flow.solve_at_time(&flow[0], &times[0], time)

    def optimum(self):
        """The Optimum where it stands."""
        return _optimum_of(self._flow, self.num_nodes, self.num_arcs)

    def trace(self, int64_t from_flow=-1):
        """A FrontierTrace from here on, with its first breakpoint recorded.

        Args:
            from_flow: the first breakpoint is the latest with more flow below it, 10 uW; negative:
                it is where this stands.
        """
        cdef FrontierTrace trace = FrontierTrace(self, from_flow)
        trace.extend(self._flow.max_time())
        return trace

    cdef int _check_guess(self, const int64_t[::1] flow, const int64_t[::1] times) except -1:
        if flow.shape[0] != self.num_arcs or (
            times is not None and times.shape[0] != self.num_nodes
        ):
            raise ValueError("a guess must have one entry an arc, and one an event")
        return 0


cdef class FrontierTrace:
    """The record of a walk down the frontier; see frontier_trace.hpp.

    Not thread-safe, optimum_at() included.

    Args:
        start: where it begins; it is copied.
        from_flow: as for ParametricFlow.trace.
    """

    cdef CppTrace* _trace
    cdef int _num_nodes, _num_arcs

    def __cinit__(self, ParametricFlow start not None, int64_t from_flow):
        self._num_nodes = start.num_nodes
        self._num_arcs = start.num_arcs
        self._trace = new CppTrace(start._flow[0], from_flow)

    def __dealloc__(self):
        del self._trace

    @property
    def min_time(self):
        """T_min, ns."""
        return self._trace.walk().min_time()

    @property
    def max_time(self):
        """T_max, ns."""
        return self._trace.walk().max_time()

    @property
    def start_time(self):
        """Where it begins, ns."""
        return self._trace.start_time()

    @property
    def end_time(self):
        """How far it has come, ns."""
        return self._trace.walk().time()

    def extend(self, int64_t until=0, progress=None):
        """Walk on to a time, ns, or to T_min; at least one breakpoint is recorded.

        Args:
            progress: called now and then with (time now, T_min), ns. Ctrl-C is honoured as often.

        Raises:
            OverflowError: a marginal cost outgrew the integer range.
        """
        cdef cbool more = True
        while more:
            with nogil:
                more = self._trace.extend(WORK_BETWEEN_SIGNALS, until)
            if progress is not None:
                progress(self.end_time, self.min_time)
            _handle_signals()

    def watch(self, const int32_t[::1] arcs not None, const int32_t[::1] later not None):
        """From now on end extend() also at a breakpoint where arcs have no period.

        That is how much later the later arcs begin, if they carry the same flow as the others and
        all begin as much later, those without flow up to their slack.

        Args:
            arcs: int32 (n,).
            later: int32 (n,), for each another arc that may be the same a round later.

        Raises:
            ValueError: there is no such arc.
        """
        if arcs.shape[0] != later.shape[0]:
            raise ValueError("every arc must have a later one")
        cdef vector[ShiftedArc] watched = vector[ShiftedArc](<size_t>arcs.shape[0])
        cdef Py_ssize_t k
        for k in range(arcs.shape[0]):
            watched[k].arc, watched[k].later = arcs[k], later[k]
        self._trace.watch(watched)

    def watch_nothing(self):
        """From now on end extend() at no breakpoint before its time."""
        self._trace.watch(vector[ShiftedArc]())

    def periods(self):
        """The period of the watched arcs at each breakpoint, ns, int64 (n,); -1 where none."""
        return _array(self._trace.periods())

    def breakpoints(self):
        """The Breakpoints recorded so far; the ends may be none, but where it began and stopped."""
        cdef size_t k
        costs = []
        for k in range(self._trace.costs().size()):
            costs.append(_int_from_wide(self._trace.costs()[k]))
        return Breakpoints(_array(self._trace.times()), _array(self._trace.flows()), costs)

    def optimum_at(self, int64_t time):
        """The Optimum at a time, ns.

        Raises:
            IndexError: time lies outside the recorded breakpoints.
        """
        return _optimum_of(&self._trace.optimum_at(time), self._num_nodes, self._num_arcs)


cdef object _optimum_of(const CppFlow* flow, int num_nodes, int num_arcs):
    times = np.empty(num_nodes, np.int64)
    flows = np.empty(num_arcs, np.int64)
    cdef int64_t[::1] t = times
    cdef int64_t[::1] f = flows
    flow.event_times(&t[0])
    flow.arc_flows(&f[0])
    return Optimum(times, flows)


cdef class Rounding:
    """Chooses one option for each operation so that a deadline holds; see rounding.hpp.

    Args:
        pred_begin, pred, pred_lag: predecessors as CSR, int32 (operations + 1,), int32 (edges,),
            int64 (edges,) ns. Operations are numbered topologically by relaxed start.
        table: int32 (operations,), the option table of each.
        option_begin: int32 (tables + 1,), first option of each table.
        time, cost: int64 (options,), ns ascending and 10 fJ descending within a table.
        finish: int64 (operations,), ns, relaxed finish times, none after the deadline.
        deadline: ns.
    """

    cdef RoundingProblem _problem
    cdef object _arrays  # keeps what _problem points to alive

    def __cinit__(
        self, const int32_t[::1] pred_begin not None, const int32_t[::1] pred not None, const int64_t[::1] pred_lag not None,
        const int32_t[::1] table not None, const int32_t[::1] option_begin not None, const int64_t[::1] time not None,
        const int64_t[::1] cost not None, const int64_t[::1] finish not None, int64_t deadline,
    ):
        if not (table.shape[0] == finish.shape[0] == pred_begin.shape[0] - 1 > 0):
            raise ValueError("table, finish and pred_begin must have one entry an operation")
        if pred.shape[0] != pred_lag.shape[0]:
            raise ValueError("pred and pred_lag must have one entry an arc")
        if option_begin.shape[0] < 2 or not (time.shape[0] == cost.shape[0] > 0):
            raise ValueError("time and cost must have one entry an option")
        self._arrays = (pred_begin, pred, pred_lag, table, option_begin, time, cost, finish)
        self._problem.num_operations = <int32_t>table.shape[0]
        self._problem.num_preds = <int32_t>pred.shape[0]
        self._problem.num_tables = <int32_t>(option_begin.shape[0] - 1)
        self._problem.num_options = <int32_t>time.shape[0]
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

    def improve(self, int32_t[::1] choice not None, int64_t moves, double heat, uint64_t seed):
        """Anneal `choice` in place from a temperature `heat`; returns whether it got cheaper."""
        cdef cbool better
        if choice.shape[0] != self._problem.num_operations:
            raise ValueError("choice must have one entry an operation")
        with nogil:
            better = cpp_improve(self._problem, moves, heat, seed, &choice[0])
        return better


cdef class Problem:
    """A pipeline with option tables, ready to be replayed exactly; see replay.hpp.

    Args:
        order: int32 (operations,), the operations in a topological order.
        stage_begin: int32 (stages + 1,), first operation of each stage.
        succ_begin, succ, succ_lag: what starts later as CSR, int32 (operations + 1,), int32
            (arcs,), int64 (arcs,) ns; the next operation of the stage is always there.
        table: int32 (operations,), the option table of each.
        table_begin: int32 (tables + 1,), first row of each table.
        time, energy: int64 (rows,), ns, ascending within a table, and 10 fJ.
        clock, leaves: int32 (rows,), which clock a row begins and ends at, ascending in MHz; -1
            where it has none.
        nearest: int32 (rows, clocks), the row that stands for each at each clock.
        waiting: int64 (stages,), blocking power, 10 uW.
        slice_begin, slice_time, slice_power: what rows draw one after the other, as CSR, int32
            (rows + 1,), int64 (slices,) ns and 10 uW; without them their average power.

    Raises:
        ValueError: the arrays contradict each other.
    """

    cdef CppProblem* _problem
    cdef readonly int num_operations, num_stages

    def __cinit__(
        self, const int32_t[::1] order not None, const int32_t[::1] stage_begin not None,
        const int32_t[::1] succ_begin not None, const int32_t[::1] succ not None, const int64_t[::1] succ_lag not None,
        const int32_t[::1] table not None, const int32_t[::1] table_begin not None, const int64_t[::1] time not None,
        const int64_t[::1] energy not None, const int32_t[::1] clock not None, const int32_t[::1] leaves not None,
        const int32_t[:, ::1] nearest not None, const int64_t[::1] waiting not None,
        const int32_t[::1] slice_begin=None, const int64_t[::1] slice_time=None,
        const int64_t[::1] slice_power=None,
    ):
        cdef ProblemArrays arrays
        if not (order.shape[0] == table.shape[0] == succ_begin.shape[0] - 1 > 0):
            raise ValueError("order, table and succ_begin must have one entry an operation")
        if not (stage_begin.shape[0] - 1 == waiting.shape[0] > 0):
            raise ValueError("stage_begin and waiting must have one entry a stage")
        if succ.shape[0] != succ_lag.shape[0]:
            raise ValueError("succ and succ_lag must have one entry an arc")
        if table_begin.shape[0] < 2 or not (
            time.shape[0] == energy.shape[0] == clock.shape[0] == leaves.shape[0]
            == nearest.shape[0] > 0
        ):
            raise ValueError("time, energy, clock, leaves and nearest must have one entry a row")
        self.num_operations = <int>order.shape[0]
        self.num_stages = <int>waiting.shape[0]
        arrays.num_operations = self.num_operations
        arrays.num_stages = self.num_stages
        arrays.num_tables = <int32_t>(table_begin.shape[0] - 1)
        arrays.num_rows = <int32_t>time.shape[0]
        arrays.num_clocks = <int32_t>nearest.shape[1]
        arrays.num_arcs = <int32_t>succ.shape[0]
        arrays.num_slices = 0
        arrays.order = &order[0]
        arrays.stage_begin = &stage_begin[0]
        arrays.succ_begin = &succ_begin[0]
        arrays.succ = &succ[0] if succ.shape[0] else NULL
        arrays.succ_lag = &succ_lag[0] if succ_lag.shape[0] else NULL
        arrays.table = &table[0]
        arrays.table_begin = &table_begin[0]
        arrays.time = &time[0]
        arrays.energy = &energy[0]
        arrays.clock = &clock[0]
        arrays.leaves = &leaves[0]
        arrays.nearest = &nearest[0, 0] if nearest.shape[1] else NULL
        arrays.waiting = &waiting[0]
        arrays.slice_begin = NULL
        if slice_begin is not None:
            if slice_time is None or slice_power is None:
                raise ValueError("slices need times and powers")
            if slice_begin.shape[0] != time.shape[0] + 1 or not (
                slice_time.shape[0] == slice_power.shape[0] > 0
            ):
                raise ValueError("slice_begin must have one entry a row and one more")
            arrays.num_slices = <int32_t>slice_time.shape[0]
            arrays.slice_begin = &slice_begin[0]
            arrays.slice_time = &slice_time[0]
            arrays.slice_power = &slice_power[0]
        self._problem = new CppProblem(arrays)

    def __dealloc__(self):
        del self._problem

    cdef int _check(self, const int32_t[::1] rows, const double[::1] factors) except -1:
        if rows.shape[0] != self.num_operations:
            raise ValueError("rows must have one entry an operation")
        if factors is not None and factors.shape[0] != self.num_operations:
            raise ValueError("factors must have one entry an operation")
        return 0

    cdef int _run(
        self, unique_ptr[CppReplay]* replay, const int32_t[::1] rows, CppMachine machine,
        const double[::1] factors,
    ) except -1:
        cdef const double* f = NULL
        self._check(rows, factors)
        if factors is not None:
            f = &factors[0]
        replay.reset(new CppReplay(self._problem[0], machine, 0))
        with nogil:
            replay.get().choose(&rows[0])
            replay.get().run(f)
        return 0

    def replay(
        self, const int32_t[::1] rows not None, int64_t latency, cbool asks_ahead,
        const double[::1] factors=None,
    ):
        """Replays rows of the operations' tables, int32 (operations,), with a latency in ns.

        Args:
            asks_ahead: whether clocks are asked for ahead, or as operations start.
            factors: float64 (operations,), what each operation's time is multiplied by.

        Returns:
            (starts, finishes, energies, makespan, energy): int64 (operations,) in ns, ns and 10 fJ,
            ns, and the int of 10 fJ used until the makespan, waiting included.

        Raises:
            ValueError: an operation has no such row.
            OverflowError: it takes more than 2**62 ns, or an operation 2**63 units of 10 fJ.
        """
        starts = np.empty(self.num_operations, np.int64)
        finishes = np.empty(self.num_operations, np.int64)
        energies = np.empty(self.num_operations, np.int64)
        cdef int64_t[::1] s = starts
        cdef int64_t[::1] f = finishes
        cdef int64_t[::1] e = energies
        cdef int32_t k, i
        cdef unique_ptr[CppReplay] replay
        self._run(&replay, rows, CppMachine(latency, asks_ahead), factors)
        for k in range(self.num_operations):
            i = self._problem.number_of[k]
            s[k] = replay.get().start(i)
            f[k] = replay.get().finish(i)
            e[k] = replay.get().energy(i)
        cdef int64_t makespan = replay.get().makespan()
        energy = _int_from_wide(replay.get().energy_until(makespan))
        return starts, finishes, energies, makespan, energy

    def parts(
        self, const int32_t[::1] rows not None, int64_t latency, cbool asks_ahead,
        const double[::1] factors=None,
    ):
        """The parts of a replay, by operation and in time order.

        Returns:
            (operation, row, clock, begin, end, energy): int32 (parts,) the first three, row
            counted over all tables, clock -1 where there is none; int64 (parts,) ns, ns and 10 fJ.
        """
        cdef vector[Part] parts
        cdef vector[int32_t] owner
        cdef int32_t k
        cdef size_t p
        cdef unique_ptr[CppReplay] replay
        self._run(&replay, rows, CppMachine(latency, asks_ahead), factors)
        for k in range(self.num_operations):
            replay.get().parts(self._problem.number_of[k], &parts)
            owner.resize(parts.size(), k)
        columns = [np.empty(parts.size(), np.int32) for _ in range(3)]
        columns += [np.empty(parts.size(), np.int64) for _ in range(3)]
        cdef int32_t[::1] operation = columns[0]
        cdef int32_t[::1] row = columns[1]
        cdef int32_t[::1] clock = columns[2]
        cdef int64_t[::1] begin = columns[3]
        cdef int64_t[::1] end = columns[4]
        cdef int64_t[::1] energy = columns[5]
        for p in range(parts.size()):
            operation[p] = owner[p]
            row[p] = parts[p].row
            clock[p] = parts[p].clock
            begin[p] = parts[p].begin
            end[p] = parts[p].end
            energy[p] = parts[p].energy
        return tuple(columns)

    def power_steps(
        self, const int32_t[::1] rows not None, int64_t latency, cbool asks_ahead,
        const double[::1] factors=None,
    ):
        """(times, power) of a replay: int64 (steps + 1,) ns from 0 to the makespan, and int64
        (steps,) 10 uW of one GPU a stage between them."""
        cdef vector[int64_t] times, power
        cdef unique_ptr[CppReplay] replay
        self._run(&replay, rows, CppMachine(latency, asks_ahead), factors)
        replay.get().power_steps(&times, &power)
        return _array(times), _array(power)

    def requests(
        self, const int32_t[::1] rows not None, int64_t latency, cbool asks_ahead,
        const double[::1] factors=None,
    ):
        """When the clock of each operation is asked for, int64 (operations,), ns; -1: it is not,
        for its stage has asked for it already, or it has none."""
        cdef int32_t k, i
        cdef unique_ptr[CppReplay] replay
        out = np.empty(self.num_operations, np.int64)
        cdef int64_t[::1] o = out
        self._run(&replay, rows, CppMachine(latency, asks_ahead), factors)
        for k in range(self.num_operations):
            i = self._problem.number_of[k]
            o[k] = replay.get().request_time(i) if replay.get().makes_request(i) else -1
        return out

    def cheapest_stage_path(
        self, int stage, int64_t latency, bint asks_ahead, int64_t min_dwell, double change,
        const double[::1] time_price not None, const double[::1] wait_price not None,
    ):
        """The cheapest way of a stage through its operations; see stage_paths.hpp.

        Args:
            change: 10 fJ a request for another clock.
            time_price: float64 (operations of the stage,), 10 fJ a ns.
            wait_price: float64 (operations of the stage + 1,), 10 fJ a ns: before each, and at the
                end.

        Returns:
            (bound, energy, changes, rows, times, waits): 10 fJ, 10 fJ, a count, int32 (operations
            of the stage,) over all tables, float64 (operations of the stage,) and one longer, ns.

        Raises:
            ValueError: there is no such stage, or a row changes clocks within itself.
        """
        cdef StagePrices prices
        cdef StagePath path
        if not 0 <= stage < self.num_stages:
            raise ValueError("there is no such stage")
        cdef int32_t size = self._problem.stage_begin[stage + 1] - self._problem.stage_begin[stage]
        if time_price.shape[0] != size or wait_price.shape[0] != size + 1:
            raise ValueError("prices must have one entry an operation of the stage")
        if size == 0:
            return 0.0, 0.0, 0, np.empty(0, np.int32), np.empty(0), np.zeros(1)
        prices.latency = latency
        prices.min_dwell = min_dwell
        prices.asks_ahead = asks_ahead
        prices.change = change
        prices.time_price = &time_price[0]
        prices.wait_price = &wait_price[0]
        with nogil:
            path = cpp_cheapest_stage_path(self._problem[0], stage, prices)
        rows = np.array(path.rows, np.int32)
        times, waits = np.array(path.times), np.array(path.waits)
        return path.bound, path.energy, path.changes, rows, times, waits

    def makespans(
        self, const int32_t[::1] rows not None, int64_t latency, cbool asks_ahead,
        const double[:, ::1] factors not None,
    ):
        """Makespans of noisy runs, int64 (runs,), ns.

        Args:
            factors: float64 (runs, operations), what times are multiplied by.
        """
        cdef int64_t begin, count, runs = factors.shape[0]
        self._check(rows, None)
        if factors.shape[1] != self.num_operations:
            raise ValueError("factors must have one column an operation")
        # Whole blocks of runs, for a few hundredths of a second.
        cdef int64_t at_once = 8 * (1 + WORK_BETWEEN_SIGNALS // (8 * self.num_operations))
        out = np.empty(runs, np.int64)
        cdef int64_t[::1] o = out
        for begin in range(0, runs, at_once):
            count = min(at_once, runs - begin)
            with nogil:
                cpp_makespans(
                    self._problem[0], &rows[0], CppMachine(latency, asks_ahead),
                    &factors[begin, 0], count, &o[begin])
            _handle_signals()
        return out


cdef class Search:
    """Looks for rows of least energy within limits; see annealing.hpp.

    Args:
        problem: numbered by when operations start, about: moves that trade time look at
            neighbours in its order.
        latency, deadline, min_dwell: ns.
        asks_ahead: whether clocks are asked for ahead, or as operations start.
        peak: cap on the power of one GPU a stage together, 10 uW; negative where there is none.
        waits: energy is that until the deadline, not until the makespan.
        price: of a ns late or of shortage, 10 uW.
        change_price: of a request for another clock, 10 fJ; at first, where there is an allowance.
        allowance: energy, 10 fJ, within which fewer requests are better; negative: there is none.
    """

    cdef Problem _problem
    cdef Limits _limits

    def __cinit__(
        self, Problem problem not None, int64_t latency, cbool asks_ahead, int64_t deadline,
        int64_t min_dwell, int64_t peak, cbool waits, int64_t price, int64_t change_price=0,
        allowance=-1,
    ):
        self._problem = problem
        self._limits = Limits(
            CppMachine(latency, asks_ahead), deadline, min_dwell, peak, waits, price, change_price,
            _wide_from_int(allowance))

    def score(self, const int32_t[::1] rows not None):
        """(excess, cost, energy, late, shortage, energy above the cap, changes), energies in 10 fJ,
        times in ns, of rows."""
        cdef Score score
        self._problem._check(rows, None)
        with nogil:
            score = cpp_score(self._problem._problem[0], self._limits, &rows[0])
        return (
            _int_from_wide(score.excess), _int_from_wide(score.cost),
            _int_from_wide(score.energy), score.late, score.shortage,
            _int_from_wide(score.over), score.changes,
        )

    def improve(
        self, const int32_t[::1] rows not None, int64_t moves, double heat, uint64_t seed,
        cbool strict_allowance=False,
    ):
        """The best rows seen while annealing from others, int32 (operations,)."""
        self._problem._check(rows, None)
        out = np.empty(self._problem.num_operations, np.int32)
        cdef int32_t[::1] best = out
        cdef cbool more = True
        cdef unique_ptr[Annealing] annealing
        annealing.reset(new Annealing(
            self._problem._problem[0], self._limits, &rows[0], moves, heat, seed,
            strict_allowance))
        while more:
            with nogil:
                more = annealing.get().run(REPLAYS_BETWEEN_SIGNALS)
            _handle_signals()
        annealing.get().best(&best[0])
        return out

    def constant(self, int passes):
        """The best rows found with one clock a stage."""
        out = np.empty(self._problem.num_operations, np.int32)
        cdef int32_t[::1] best = out
        cdef unique_ptr[ConstantClocks] clocks
        cdef cbool better
        cdef int32_t stage
        with nogil:
            clocks.reset(new ConstantClocks(self._problem._problem[0], self._limits))
        for _ in range(passes):
            better = False
            for stage in range(self._problem.num_stages):
                with nogil:
                    better = clocks.get().improve(stage) or better
                _handle_signals()
            if not better:
                break
        clocks.get().best(&best[0])
        return out


cdef object _array(const vector[int64_t]& values):
    out = np.empty(values.size(), np.int64)
    cdef int64_t[::1] view = out
    cdef size_t k
    for k in range(values.size()):
        view[k] = values[k]
    return out


def compose(
    const int32_t[:, ::1] option_end not None, const int64_t[::1] time not None, const int64_t[::1] energy not None,
    const uint8_t[::1] asks not None, int64_t latency, int64_t min_dwell, int64_t waiting, int64_t slack,
    int64_t max_choices,
):
    """All Pareto options of an operation from those of its parts; see parts.hpp.

    Args:
        option_end: int32 (parts, clocks), where each part's options at each clock end; they follow
            each other by part and clock.
        time, energy: int64 (options,), ns and 10 fJ.
        asks: uint8 (parts,).
        latency, min_dwell: ns.
        waiting: 10 uW.
        slack: 10 fJ.
        max_choices: that may be kept at a time.

    Returns:
        The option of each part: int32 (n, parts).

    Raises:
        OverflowError: there are more choices than that.
        ValueError: arrays differ in length.
    """
    cdef Py_ssize_t parts = option_end.shape[0], clocks = option_end.shape[1], k, p
    if parts == 0 or clocks == 0 or asks.shape[0] != parts or not (
        time.shape[0] == energy.shape[0] > 0
    ):
        raise ValueError("there must be parts and clocks, and one time and energy an option")
    begin = np.concatenate([[0], np.asarray(option_end).ravel()]).astype(np.int32)
    cdef const int32_t[::1] b = begin
    cdef PartsProblem problem
    problem.num_parts = <int32_t>parts
    problem.num_clocks = <int32_t>clocks
    problem.num_options = <int32_t>time.shape[0]
    problem.option_begin = &b[0]
    problem.time = &time[0]
    problem.energy = &energy[0]
    problem.asks = &asks[0]
    problem.latency, problem.min_dwell = latency, min_dwell
    problem.waiting, problem.slack = waiting, slack
    cdef vector[Composed] composed
    with nogil:
        composed = cpp_compose(problem, max_choices)
    options = np.empty((composed.size(), parts), np.int32)
    cdef int32_t[:, ::1] o = options
    for k in range(<Py_ssize_t>composed.size()):
        for p in range(parts):
            o[k, p] = composed[k].options[p]
    return options


cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1


cdef int _handle_signals() except -1:
    stop = STOP.get()
    if stop is not None and stop.is_set():
        raise KeyboardInterrupt
    return PyErr_CheckSignals()
