"""A spec as JSON, both ways. Costs travel as the points that the run visits, a schedule as its orders."""

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pandas as pd

from terapipe.config import ModelConfig
from terapipe.cost import describe_links, read_links
from terapipe.errors import SpecError, check_keys
from terapipe.schedule import Schedule
from terapipe.spec.costs import VisitedCost, visited_costs

if TYPE_CHECKING:
    from terapipe.spec.spec import RunSpec

FORMAT = 1


def write_spec(spec: "RunSpec") -> str:
    """The spec as JSON."""
    values: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(spec)}
    values["model"] = spec.model.to_dict()
    values["slicing"] = [str(slicing) for slicing in spec.slicings]
    if isinstance(spec.schedule, Schedule):
        orders = [" ".join(map(str, order)) for order in spec.schedule.orders]
        values["schedule"] = {"name": spec.schedule.name, "orders": orders}
    values["cost"] = None if spec.cost is None else visited_costs(spec.slicings, spec.stage_costs).to_dict("list")
    values["link"] = describe_links(spec.link)
    for name in ("text", "directory"):
        values[name] = None if values[name] is None else str(values[name])
    return json.dumps({"format": FORMAT, **values}, indent=2)


def read_spec(kind: "type[RunSpec]", text: str) -> "RunSpec":
    """The spec that `write_spec` wrote; unknown keys and other formats are refused."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"not a run spec: {error}.") from None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise SpecError(f'not a run spec of "format": {FORMAT}: {text[:60]!r}…')
    check_keys("run", values, (field.name for field in fields(kind)), SpecError)
    missing = [key for key in ("model", "slicing") if key not in values]
    if missing:
        raise SpecError(f"a run spec needs {' and '.join(missing)}; given: {', '.join(values) or 'nothing'}.")
    try:
        return kind(**(_read_values(values) | {"directory": None}))
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"not a run spec as RunSpec.to_json writes it: {error!r}.") from error


def _read_values(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON cannot hold, made from what it holds."""
    read = values | {"model": ModelConfig.from_dict(values["model"])}
    if len(values["slicing"]) == 1:
        read["slicing"] = values["slicing"][0]
    if isinstance(values.get("schedule"), dict):
        orders = dict(enumerate(values["schedule"]["orders"]))
        read["schedule"] = Schedule.from_orders(orders, values["slicing"][0], values["schedule"]["name"])
    if values.get("cost") is not None:
        tables = pd.DataFrame(values["cost"]).groupby("stage")
        read["cost"] = [VisitedCost(table.drop(columns="stage")) for _, table in tables]
    read["link"] = read_links(values.get("link"))
    return read
