"""Where a timeline's times come from: the texts of its column `source`. The first word is the kind of source."""

SIMULATED = "simulated"
SIMULATED_EXTRAPOLATED = "simulated, extrapolated"  # with costs of slices beyond what was measured
EMULATED = "emulated"
EMULATED_EXTRAPOLATED = "emulated, extrapolated"
MEASURED = "measured"
GIVEN = "given"
REPLAYED = "replayed"  # measured durations at other times; what they are comes after it where they are not measured
LINK_GIVEN = ", link given"  # after the source of a run whose messages waited for the link of its spec
MODELLED = (SIMULATED, f"{REPLAYED}, {SIMULATED}")  # what begins so has the simulator's times: no gap is a runtime's


def replayed(source: str) -> str:
    """The source of a replay of this source; a replay of a replay is called no more than one."""
    if source.startswith(REPLAYED):
        return source
    if source == GIVEN:
        return REPLAYED
    return REPLAYED + source.removeprefix(MEASURED) if source.startswith(MEASURED) else f"{REPLAYED}, {source}"
