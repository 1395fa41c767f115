"""What operations and copies cost on the machine of a run, as the core's lanes take it: numbers by place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.core.core import PLACES
from sim.machine.memory_law import GPU_BY_COPIES
from sim.machine.price import Launch, Price

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.workload.iterations import Iteration


class Prices:
    """Prices each operation once and hands it to the lanes, which ask for those of experts when they first need them.

    `launches`: those that operations use, by number.
    """

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        launches = cost.launches
        self.begin_s, self.sync_s, self.kernel_s = launches.begin_s, launches.sync_s, launches.kernel_s
        self.grouped = launches.grouped
        self.has_shared, self.has_dense = cost.has_shared, cost.has_dense
        self.n_dense_before = cost.n_dense_before
        self.predictors = cost.q_predictor
        self.launches: list[Launch] = []
        self._number: dict[int, int] = {}
        self._experts: dict[tuple[float, int], int] = {}  # places, by what their group has left to fill, and tokens
        self._attentions: dict[int, Price] = {}  # of one token, by the positions before it
        self._predictions: dict[float, int] = {}  # places, by seconds
        self._predicting = Launch(1, self.kernel_s, 0.0)
        self._n_tokens, self._n_out = 0, -1
        sharing = cost.sharing
        self.shares = sharing.on
        self._capacity_per_s = sharing.gpu_bytes_per_s
        self._left_per_s = sharing.gpu_bytes_per_s - sharing.up_bytes_per_s
        self._least_per_s = sharing.gpu_bytes_per_s - sharing.up_bytes_per_s - sharing.down_bytes_per_s
        self._up_term, self._down_term = (sharing.stated.get(term, -1.0) for term in GPU_BY_COPIES)

    def forget(self) -> None:
        """Operations begin anew."""
        self._n_tokens, self._n_out = 0, -1
        self._experts.clear()
        self._predictions.clear()
        self._attentions.clear()

    def begin(self, lanes: Any, iteration: Iteration) -> None:
        """Price what an iteration runs."""
        cost, launches = self.cost, self.cost.launches
        anew = iteration.n_tokens != self._n_tokens
        self._n_tokens = iteration.n_tokens
        if not anew and self._n_tokens == 1:
            context = iteration.ranges[0].context
            price = self._attentions.get(context)
            if price is None:
                price = self._attentions[context] = cost.attention(iteration)
        else:
            price = cost.attention(iteration)
        self._put(lanes, "attention", launches.attention, price)
        if anew:
            self._put(lanes, "gate", launches.gate, cost.gate(self._n_tokens))
            if self.has_shared:
                self._put(lanes, "shared", launches.shared, cost.shared(self._n_tokens))
        if self.has_dense:
            self._put(lanes, "dense", launches.dense, cost.dense_layer(iteration))
        if iteration.n_out != self._n_out:
            self._n_out = iteration.n_out
            self._put(lanes, "head", launches.head_of(self._n_out), cost.head(self._n_out))

    def begin_alone(self, lanes: Any) -> None:
        """Price what an iteration of one decode token runs, but for its attention."""
        cost, launches = self.cost, self.cost.launches
        self._n_tokens = self._n_out = 1
        self._put(lanes, "attention", launches.attention, Price(0.0, 0))
        self._put(lanes, "gate", launches.gate, cost.gate(1))
        if self.has_shared:
            self._put(lanes, "shared", launches.shared, cost.shared(1))
        self._put(lanes, "head", launches.head_of(1), cost.head(1))

    def attention(self, context: int) -> tuple[float, int, float]:
        """Seconds, figure and seconds longer beside a copy of attention of one decode token, behind so many others."""
        of_one = self.cost.attention_of_one
        assert of_one is not None
        price = of_one(context)
        return price.duration_s, price.attributed_to, self._slowed_s(price)

    def expert(self, lanes: Any, slack_s: float, n_tokens: int) -> int:
        """The place of an expert's operation: of one that joins a group which has `slack_s` of its kernels' floor left
        to fill, or (-1) that begins one, or runs by itself."""
        found = self._experts.get((slack_s, n_tokens))
        if found is None:
            cost, launches, precision = self.cost, self.cost.launches, self.cost.precision
            launch, left_s = launches.expert, 0.0
            if not self.grouped:
                price = cost.expert(n_tokens, precision, 1.0, 1.0)
            elif slack_s < 0.0:
                price, left_s = cost.leader(n_tokens, precision, 1.0)
            else:
                price, left_s = cost.member(slack_s, n_tokens, precision, 1.0)
                launch = launches.member
            found = self._experts[slack_s, n_tokens] = self._put(lanes, "", launch, price, left_s)
        return found

    def prediction(self, lanes: Any, duration_s: float) -> int:
        """The place of a predictor's operation on the stream, which takes so long; its figure is told apart."""
        found = self._predictions.get(duration_s)
        if found is None:
            price = Price(duration_s, len(self.cost.figures.entries))
            found = self._predictions[duration_s] = self._put(lanes, "", self._predicting, price)
        return found

    def _put(self, lanes: Any, block: str, launch: Launch, price: Price, left_s: float = 0.0) -> int:
        number = self._number.get(id(launch))
        if number is None:
            number = self._number[id(launch)] = len(self.launches)
            self.launches.append(launch)
        costs = price.duration_s, price.attributed_to, self._slowed_s(price)
        host = launch.first_s, launch.all_s, launch.tail_frac
        put: int = lanes.put_op(PLACES.get(block, -1), number, host, costs, left_s)
        return put

    def _slowed_s(self, price: Price) -> float:
        """What an operation takes longer beside a copy, by the law of `sim.machine.shared_memory`; -1.0: nothing, but
        something beside pieces that are written back, so that it is remembered like others."""
        if not self.shares:
            return 0.0
        duration_s, draws_per_s = price.duration_s, min(price.draws_per_s, self._capacity_per_s)
        up = draws_per_s / self._left_per_s - 1.0 if draws_per_s > self._left_per_s else 0.0
        down = draws_per_s / self._least_per_s - 1.0 - up if draws_per_s > self._least_per_s else 0.0
        if self._up_term >= 0.0:
            up = self._up_term
        if self._down_term >= 0.0:
            down = self._down_term
        slowed_s = duration_s * up
        return -1.0 if not slowed_s > 0.0 and duration_s * down > 0.0 else slowed_s
