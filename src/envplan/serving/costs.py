"""Costs of a simulated fleet, in money and CO2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from envplan.costs.model import Overheads
from envplan.costs.rates import Rate
from envplan.serving.simulation import Simulation

_HOUR_S: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class FleetCosts:
    """Costs of a simulated fleet; None where no rate is given.

    Attributes:
        money: currency units.
        carbon_g: gCO2.
    """

    money: float | None = None
    carbon_g: float | None = None


@dataclass(frozen=True, kw_only=True)
class FleetRates:
    """Rates per kWh, and overheads beside the energy of GPUs.

    Attributes:
        price: currency units per kWh, over the trace; None: not given.
        carbon: gCO2 per kWh, over the trace; None: not given.
        overheads: PUE, hosts, and what GPUs cost besides energy.
    """

    price: Rate | None = None
    carbon: Rate | None = None
    overheads: Overheads = field(default_factory=Overheads)

    def costs_of(self, simulation: Simulation) -> FleetCosts:
        """The costs of a simulation: money with a price of energy or of GPU hours, else None."""
        return FleetCosts(money=self._money(simulation), carbon_g=self._carbon_g(simulation))

    def _money(self, simulation: Simulation) -> float | None:
        if self.price is None and not self.overheads.gpu_hour:
            return None
        gpu_time = self.overheads.gpu_time_cost(_HOUR_S, 1) * simulation.gpu_hours
        energy = 0.0 if self.price is None else simulation.cost_at(self.price, self.overheads)
        return energy + gpu_time

    def _carbon_g(self, simulation: Simulation) -> float | None:
        if self.carbon is None:
            return None
        embodied_g = self.overheads.embodied_carbon_g(_HOUR_S, 1) * simulation.gpu_hours
        return simulation.cost_at(self.carbon, self.overheads) + embodied_g
