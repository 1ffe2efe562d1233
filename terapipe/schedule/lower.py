"""Lowering: the compute order of a schedule with the sends and receives that follow from it."""

from terapipe.schedule.action import Action, Kind
from terapipe.schedule.schedule import Schedule


def lower(schedule: Schedule) -> list[list[Action]]:
    """Each rank's actions with transfers added.

    A receive stands right before the action that needs it, a send right after the one that made it.
    A receive names the stage that receives, a send the stage that sends. Stages on one rank hand
    over without a transfer.
    """
    homes, last = schedule.stage_to_rank, schedule.n_stages - 1
    lowered = []
    for rank, order in enumerate(schedule.orders):
        actions: list[Action] = []
        for action in order:
            stage, forward = action.stage, action.kind is Kind.F
            moves = action.kind is not Kind.W
            source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            receive, send = (Kind.RECV_F, Kind.SEND_F) if forward else (Kind.RECV_B, Kind.SEND_B)
            if moves and 0 <= source <= last and homes[source] != rank:
                actions.append(action._replace(kind=receive))
            actions.append(action)
            if moves and 0 <= target <= last and homes[target] != rank:
                actions.append(action._replace(kind=send))
        lowered.append(actions)
    return lowered
