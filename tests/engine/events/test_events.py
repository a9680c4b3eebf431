"""Events: keys, equality, typed payloads, joining, copying."""

from __future__ import annotations

import copy
import pickle
import traceback
from dataclasses import FrozenInstanceError, dataclass

import msgspec
import pytest
from ignite.engine import EventEnum as IgniteEventEnum
from ignite.engine import Events as IgniteEvents
from ignite.engine.events import EventsList as IgniteEventsList

from pulsetrain.engine import Event, EventEnum, Events
from pulsetrain.engine.events.names import COUNTERS, EventsList, identify
from pulsetrain.engine.events.payloads import Preempted, Terminated, payload_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMeasured:
    mean: float


class RolloutEvents(EventEnum):
    ROLLOUT_STARTED = "rollout_started"
    REWARD_MEASURED = "reward_measured", RewardMeasured


class OtherEvents(EventEnum):
    STARTED = "started"


class IgniteOtherEvents(IgniteEventEnum):
    STARTED = "started"


def same_name_elsewhere() -> type[EventEnum]:
    class RolloutEvents(EventEnum):
        ROLLOUT_STARTED = "rollout_started"

    return RolloutEvents


# ------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("theirs", IgniteEvents, ids=lambda event: event.name)
def test_each_of_ignites_events_equals_ours_both_ways_and_hashes_alike(theirs):
    ours = Events[theirs.name]
    assert ours == theirs
    assert theirs == ours
    assert hash(ours) == hash(theirs)
    assert {ours: 1}[theirs] == 1
    assert {theirs: 1}[ours] == 1
    assert identify(ours)[0] == identify(theirs)[0]
    assert identify(theirs)[1] is ours
    assert ours.value == theirs.value


@pytest.mark.parametrize("other", [OtherEvents.STARTED, IgniteOtherEvents.STARTED], ids=["ours", "ignite's"])
def test_started_of_a_different_enum_is_a_different_event(other):
    ours = Events.STARTED
    assert (ours == other) is False  # from the other side ignite compares names alone
    assert identify(Events.STARTED)[0] != identify(other)[0]
    assert identify(other)[1] is other


def test_two_enums_of_one_name_hold_different_events():
    assert RolloutEvents.ROLLOUT_STARTED != same_name_elsewhere().ROLLOUT_STARTED


@pytest.mark.parametrize(
    ("enum", "name", "message"),
    [
        (Events, "ITERATION_COMPLETE", "Events has no event 'ITERATION_COMPLETE'; did you mean 'ITERATION_COMPLETED'?"),
        (Events, "iteration_completed", "did you mean 'ITERATION_COMPLETED'?"),
        (
            RolloutEvents,
            "REWARD_MESURED",
            "RolloutEvents has no event 'REWARD_MESURED'; did you mean 'REWARD_MEASURED'",
        ),
        (RolloutEvents, "XYZ", "RolloutEvents has no event 'XYZ'; it has ROLLOUT_STARTED, REWARD_MEASURED"),
    ],
)
def test_a_misspelt_member_is_answered_with_the_nearest(enum, name, message):
    with pytest.raises(AttributeError) as caught:
        getattr(enum, name)
    assert message in str(caught.value)
    assert not hasattr(enum, name)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.lower().count("did you mean") == message.count("did you mean")  # the interpreter adds none


def test_a_name_of_a_library_s_protocol_is_absent_from_an_enum_of_events():
    with pytest.raises(AttributeError, match=r"^_repr_html_$"):
        getattr(Events, "_repr_html_")  # noqa: B009


def test_a_filtered_event_equals_its_member_and_finds_it_in_a_table():
    filtered = Events.ITERATION_COMPLETED(every=3)
    assert filtered == Events.ITERATION_COMPLETED
    assert filtered == IgniteEvents.ITERATION_COMPLETED(every=7)
    assert filtered != Events.ITERATION_STARTED
    assert {Events.ITERATION_COMPLETED: "found"}[filtered] == "found"


def test_a_member_equals_its_own_name_as_in_ignite():
    assert Events.STARTED == "STARTED"
    assert Events.STARTED != "COMPLETED"
    assert Events.STARTED != 1


def test_every_event_of_ignite_is_one_of_ours():
    assert {event.name for event in IgniteEvents} <= set(Events.__members__)


def test_counters_of_ignites_events_are_those_that_ignite_reads():
    from ignite.engine.events import State

    assert {event.name: State.event_to_attr[event] for event in IgniteEvents if event in State.event_to_attr} == {
        event.name: counter for event, counter in COUNTERS.items() if event.name in IgniteEvents.__members__
    }


@pytest.mark.parametrize("value", [None, 3, 2.5, object()])
def test_what_is_not_an_event_has_no_key(value):
    with pytest.raises(TypeError, match="not an event"):
        identify(value)


# ------------------------------------------------------------------------------------------------- payloads


def test_a_custom_member_is_a_value_or_a_value_and_the_type_of_its_payload():
    assert RolloutEvents.ROLLOUT_STARTED.value == "rollout_started"
    assert RolloutEvents.ROLLOUT_STARTED.payload_type is None
    assert RolloutEvents.REWARD_MEASURED.value == "reward_measured"
    assert RolloutEvents.REWARD_MEASURED.payload_type is RewardMeasured
    assert RolloutEvents.REWARD_MEASURED(every=2).payload_type is RewardMeasured
    assert RolloutEvents("reward_measured") is RolloutEvents.REWARD_MEASURED


def test_a_payload_that_is_not_a_type_is_refused_when_the_enum_is_made():
    with pytest.raises(TypeError, match=r"Wrong\.a: the payload needs to be a type, not 3"):

        class Wrong(EventEnum):
            A = "a", 3


def test_a_value_that_is_not_a_string_is_refused_when_the_enum_is_made():
    with pytest.raises(TypeError, match="needs to be a string, not 3"):

        class Wrong(EventEnum):
            A = 3


def test_two_members_of_one_value_and_different_payloads_are_refused():
    with pytest.raises(TypeError, match=r"Wrong\.B: the value 'same' is Wrong\.A's"):

        class Wrong(EventEnum):
            A = "same", Terminated
            B = "same", Preempted


def test_payloads_are_frozen_and_keyword_only():
    payload = Terminated(reason="done")
    with pytest.raises(FrozenInstanceError):
        payload.reason = "other"
    with pytest.raises(TypeError):
        Terminated("done")


def test_payload_fields_are_given_by_name_and_not_copied():
    error = ValueError()
    from pulsetrain.engine.events.payloads import ExceptionRaised

    assert payload_fields(ExceptionRaised(error=error))["error"] is error


def test_the_event_record_is_a_struct_that_goes_over_the_wire():
    event = Event(3, "trainer", "started", 0, 0, None, 17)
    assert msgspec.json.decode(msgspec.json.encode(event)) == {
        "seq": 3,
        "engine": "trainer",
        "type": "started",
        "epoch": 0,
        "iteration": 0,
        "payload": None,
        "time_ns": 17,
    }


# -------------------------------------------------------------------------------------------------- joining


def test_joining_changes_neither_side():
    left = Events.STARTED | Events.COMPLETED
    right = Events.EPOCH_STARTED | Events.EPOCH_COMPLETED
    joined = left | right | Events.TERMINATE
    assert [len(left), len(right), len(joined)] == [2, 2, 5]
    assert list(joined) == [
        Events.STARTED,
        Events.COMPLETED,
        Events.EPOCH_STARTED,
        Events.EPOCH_COMPLETED,
        Events.TERMINATE,
    ]
    grown = left
    grown |= Events.TERMINATE
    assert len(left) == 2
    assert len(grown) == 3


def test_members_join_filtered_events_lists_and_ignites_own():
    joined = Events.STARTED | Events.EPOCH_STARTED(every=2) | IgniteEvents.COMPLETED
    assert isinstance(joined, EventsList)
    assert isinstance(joined, IgniteEventsList)
    assert [event.name for event in joined] == ["STARTED", "EPOCH_STARTED", "COMPLETED"]
    assert next(iter(Events.TERMINATE | joined)).name == "TERMINATE"
    assert len(Events.TERMINATE | joined) == 4
    assert len(IgniteEvents.STARTED | Events.COMPLETED) == 2


def test_joining_what_is_not_an_event_is_a_type_error():
    with pytest.raises(TypeError, match="should be Events or CallableEventWithFilter"):
        Events.STARTED | "COMPLETED"


# --------------------------------------------------------------------------------------- repr, copy, pickle


def test_events_say_their_enum_name_and_filter():
    assert repr(Events.STARTED) == str(Events.STARTED) == "Events.STARTED"
    assert repr(RolloutEvents.REWARD_MEASURED) == "RolloutEvents.REWARD_MEASURED"
    assert repr(Events.STARTED(every=1)) == "Events.STARTED"
    assert repr(Events.STARTED(every=2)) == "Events.STARTED(every=2)"


@pytest.mark.parametrize("member", [Events.STARTED, Events.TERMINATE, RolloutEvents.REWARD_MEASURED], ids=str)
def test_a_member_survives_copy_and_pickle_as_itself(member):
    assert copy.copy(member) is member
    assert copy.deepcopy(member) is member
    assert pickle.loads(pickle.dumps(member)) is member


def test_a_filtered_event_survives_deepcopy_and_pickle():
    filtered = Events.ITERATION_COMPLETED(every=3, after=4)
    for twin in (copy.deepcopy(filtered), pickle.loads(pickle.dumps(filtered))):
        assert twin == filtered
        assert twin.filter == filtered.filter
        assert twin.member is Events.ITERATION_COMPLETED


def test_a_pickled_filtered_event_leaves_out_its_key_which_is_this_processs_own():
    filtered = Events.ITERATION_COMPLETED(every=3)
    assert filtered.key.encode() not in pickle.dumps(filtered)
