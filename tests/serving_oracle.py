"""A slow replay of instances, iteration by iteration, independent of the compiled one.

It has one pool with any scheduler, or one instance for prompts and one that decodes. Every step is
looked at by itself, and every token of memory is counted anew at each of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

LEAST_REST = 32  # tokens that are kept for a request that has got as many as were expected
NEVER = float("inf")


@dataclass(frozen=True)
class Costs:
    """What an instance takes and draws; prompts are proportional to their tokens."""

    idle_w: float = 100.0
    step_s: float = 0.02
    request_s: float = 0.001  # that each request adds to a step
    step_w: float = 300.0
    token_s: float = 1e-4
    prompt_w: float = 700.0
    context_s: float = 1e-6
    context_w: float = 500.0
    max_batch: int = 12

    def step(self, batch: int) -> float:
        return self.step_s + self.request_s * batch


@dataclass
class Request:
    number: int
    arrival: float
    input: int
    output: int
    expected: int
    deadline: float = 0.0
    begun: int = 0  # tokens of its prompt that are through
    generated: int = 0
    recomputed: int = 0  # tokens of its output that are part of its prompt
    first_token: float = NEVER
    finished: float = NEVER
    reserve: int = 0
    order: int = 0
    is_unservable: bool = False

    @property
    def prompt(self) -> int:
        return self.input + self.recomputed

    @property
    def context(self) -> int:
        """Tokens that the next step reads."""
        return self.input + self.generated


@dataclass
class Oracle:
    """The replay; `run` fills in the requests, `energy_j` and the counts.

    Attributes:
        requests: by arrival.
        senders: instances that only run prompts, each its share of the requests by number, for the
            one that decodes; 0: one instance does both.
        token_transfer_s: how long a token's context takes over the link of a sender.
        token_receive_s: the same of the instance that decodes.
    """

    requests: Sequence[Request]
    costs: Costs
    scheduler: str
    chunk: int
    kv_tokens: int
    ttft_s: float
    end_s: float
    senders: int = 0
    transfer_s: float = 0.0
    token_transfer_s: float = 0.0
    token_receive_s: float = 0.0
    energy_j: float = 0.0
    preempted: int = 0
    transferred: int = 0
    most_used: int = 0
    events: list[tuple[float, int, str, object]] = field(default_factory=list)
    counter: int = 0

    def run(self) -> None:
        self.instances = [_Instance(self, number) for number in range(self.senders + 1)]
        for request in self.requests:
            self.at(request.arrival, "arrive", request)
        while self.events:
            now, _, what, subject = heapq.heappop(self.events)
            if what == "arrive":
                self.sender_of(subject).arrive(now, subject)
            elif what == "transferred":
                sender, receiver = self.sender_of(subject), self.instances[-1]
                sender.holds.remove(subject)
                receiver.coming.remove(subject)
                receiver.here.append(subject)
                receiver.wake(now)
                sender.wake(now)
            else:
                self.instances[subject].end_iteration(now)
        for instance in self.instances:
            instance.draw(self.costs.idle_w, instance.since, self.end_s)

    def sender_of(self, request: Request) -> _Instance:
        """The instance that runs a request's prompt first."""
        return self.instances[request.number % max(1, self.senders)]

    def send(self, now: float, request: Request) -> None:
        """Put a context on both links: each carries one after another, the second as it comes."""
        sender, receiver = self.sender_of(request), self.instances[-1]
        begins = max([now, *(end for _, end in sender.sends)])
        sends = (begins, begins + request.prompt * self.token_transfer_s)
        begins = max([sends[0], *(end for _, end in receiver.receives)])
        receives = (begins, begins + request.prompt * self.token_receive_s)
        sender.sends.append(sends)
        receiver.receives.append(receives)
        self.transferred += 1
        self.at(max(sends[1], receives[1]) + self.transfer_s, "transferred", request)

    def at(self, time: float, what: str, subject: object) -> None:
        self.counter += 1
        heapq.heappush(self.events, (time, self.counter, what, subject))


class _Instance:
    def __init__(self, oracle: Oracle, number: int) -> None:
        self.oracle, self.number = oracle, number
        self.waiting: list[Request] = []
        self.prompts: list[Request] = []  # begun
        self.batch: list[Request] = []
        self.pieces: list[tuple[Request, int]] = []
        self.holds: list[Request] = []  # contexts on their way from here, or waiting for it
        self.asking: list[Request] = []  # that wait for memory here
        self.coming: list[Request] = []
        self.here: list[Request] = []
        self.late: list[Request] = []  # of `waiting` and `prompts`
        self.is_idle, self.since, self.order = True, 0.0, 0
        self.sends: list[tuple[float, float]] = []  # from when to when each context is on the link
        self.receives: list[tuple[float, float]] = []

    @property
    def decodes(self) -> bool:
        return self is self.oracle.instances[-1]

    def draw(self, watts: float, begin: float, end: float) -> None:
        end = min(end, self.oracle.end_s)
        self.oracle.energy_j += watts * max(0.0, end - begin)

    def used(self) -> int:
        prompts = [*self.prompts, *self.holds, *self.coming, *self.here]
        return sum(r.prompt for r in prompts) + sum(r.context for r in self.batch)

    def reserved(self) -> int:
        inside = [*self.prompts, *self.coming, *self.here, *self.batch]
        return sum(r.reserve for r in inside) + sum(r.input + 1 for r in self.holds)

    def arrive(self, now: float, request: Request) -> None:
        if request.input + 1 > self.oracle.kv_tokens:
            request.is_unservable = True
            return
        request.deadline = request.arrival + self.oracle.ttft_s
        request.reserve = request.input + (request.expected if self.decodes else 1)
        self.waiting.append(request)
        self.wake(now)

    def wake(self, now: float) -> None:
        if self.is_idle:
            self.draw(self.oracle.costs.idle_w, self.since, now)
            self.next_iteration(now)

    def next_iteration(self, now: float) -> None:
        costs, kv = self.oracle.costs, self.oracle.kv_tokens
        self.since = now
        for request in self.here:
            self.decode(request)
        self.here = []
        while self.used() > kv and self.batch:
            self.preempt(now)
        self.oracle.most_used = max(self.oracle.most_used, self.used())
        while self.asking and not self.waiting and not self.prompts:
            first = self.asking[0]
            inside = len(self.batch) + len(self.coming)
            room = kv - max(self.used(), self.reserved()) >= first.input + first.expected
            if self.reserved() and not (room and inside < costs.max_batch):
                break
            first.reserve = first.input + first.expected
            self.coming.append(self.asking.pop(0))
            self.oracle.send(now, first)
        self.choose_pieces(now)
        context_s = costs.context_s * sum(r.context for r in self.batch)
        if self.pieces:
            tokens = sum(count for _, count in self.pieces)
            beside_s = costs.step(len(self.batch)) - costs.step(1) if self.batch else 0.0
            computing_s = tokens * costs.token_s + beside_s
            watts = max(costs.prompt_w, costs.step_w if self.batch else 0.0)
        elif self.batch:
            computing_s, watts = costs.step(len(self.batch)), costs.step_w
        else:
            self.is_idle = True
            return
        self.is_idle = False
        end = now + computing_s + context_s
        mean_w = (computing_s * watts + context_s * costs.context_w) / (computing_s + context_s)
        self.draw(mean_w, now, end)
        self.oracle.at(end, "end", self.number)

    def preempt(self, now: float) -> None:
        last = max(self.batch, key=lambda r: r.order)
        self.batch.remove(last)
        last.recomputed, last.begun = last.generated, 0
        if last.prompt + 1 > self.oracle.kv_tokens:
            last.is_unservable = True
            return
        last.reserve = min(self.oracle.kv_tokens, max(last.reserve, last.prompt + LEAST_REST))
        last.deadline = now + self.oracle.ttft_s
        self.oracle.preempted += 1
        self.waiting.append(last)

    def choose_pieces(self, now: float) -> None:
        room = self.oracle.chunk
        if self.oracle.scheduler == "fcfs":
            room = max(1, room - len(self.batch))
        self.pieces = []
        running: list[Request] = []
        while room > 0:
            request = self.next_prompt(now, running)
            if request is None:
                return
            if request in self.waiting:
                self.waiting.remove(request)
                self.prompts.append(request)
            tokens = min(room, request.prompt - request.begun)
            room -= tokens
            running.append(request)
            self.pieces.append((request, tokens))

    def next_prompt(self, now: float, running: Sequence[Request]) -> Request | None:
        begun = [r for r in self.prompts if r not in running]
        if self.oracle.scheduler == "fcfs":
            if begun:
                return begun[0]
            first = min(self.waiting, key=lambda r: r.number, default=None)
            return first if first is not None and self.fits(first, running) else None
        # What is late goes behind what is not: first what was begun, the one that was late last.
        turned_late = [r for r in [*begun, *self.waiting] if r.deadline < now]
        for request in sorted(turned_late, key=lambda r: r.deadline):
            if request not in self.late:
                self.late.insert(0 if request.begun else len(self.late), request)
        in_time = [r for r in [*begun, *self.waiting] if r.deadline >= now]
        late_begun = self.late[0] if self.late and self.late[0].begun else None
        first = min(in_time, key=lambda r: r.deadline, default=None)
        if first is not None:
            if first in begun or self.fits(first, running):
                return first
            return self.take_late(late_begun)
        if late_begun is not None:
            return self.take_late(late_begun)
        if self.late and self.fits(self.late[0], running):
            return self.take_late(self.late[0])
        return None

    def take_late(self, request: Request | None) -> Request | None:
        if request is not None:
            self.late.remove(request)
        return request

    def fits(self, request: Request, running: Sequence[Request]) -> bool:
        if not self.reserved():
            return True
        inside = len(self.batch) + len(running)
        taken = max(self.used(), self.reserved())
        return (
            taken + request.reserve <= self.oracle.kv_tokens
            and inside < self.oracle.costs.max_batch
        )

    def end_iteration(self, now: float) -> None:
        for request in list(self.batch):
            request.generated += 1
            if request.generated == request.output:
                request.finished = now
                self.batch.remove(request)
        for request, tokens in self.pieces:
            request.begun += tokens
            if request.begun == request.prompt:
                self.prompts.remove(request)
                self.end_prompt(now, request)
        self.pieces = []
        self.next_iteration(now)

    def end_prompt(self, now: float, request: Request) -> None:
        request.first_token = min(now, request.first_token)
        if request.generated + 1 >= request.output:
            request.generated += 1
            request.finished = now
        elif self.decodes:
            self.decode(request)
        else:
            self.holds.append(request)
            other = self.oracle.instances[-1]
            if request.input + 2 > self.oracle.kv_tokens:
                self.holds.remove(request)
                request.is_unservable = True
                return
            other.asking.append(request)
            other.wake(now)

    def decode(self, request: Request) -> None:
        self.order += 1
        request.order = self.order
        request.generated += 1
        self.batch.append(request)
