"""A parked agent is told from a slow model, a working one, and one that only lingers (G7)."""

from rollyard.agents import ActivitySample, Watchdog


def watch(*samples: ActivitySample, idle_s: float = 60, linger_s: float = 3) -> list[str]:
    dog = Watchdog(idle_s=idle_s, linger_s=linger_s)
    return [dog.see(sample) for sample in samples]


def at(t: float, **fields) -> ActivitySample:
    return ActivitySample(at=t, **{"in_flight": 0, "last_output_at": 0.0, "cpu_s": 1.0, **fields})


def test_silence_without_call_cpu_or_output_is_parked():
    assert watch(at(0), at(30), at(59), at(61)) == ["working", "working", "working", "parked"]


def test_a_call_in_flight_is_the_models_slowness_however_long():
    assert watch(at(0), at(30, in_flight=1), at(6000, in_flight=1)) == ["working", "working", "model_slow"]


def test_the_clock_starts_again_when_the_slow_model_has_answered():
    assert watch(at(0), at(600, in_flight=1), at(630), at(661))[-2:] == ["working", "parked"]


def test_output_and_cpu_are_work():
    assert watch(at(0), at(59), at(100, last_output_at=90.0))[-1] == "working"
    assert watch(at(0), at(50), at(100, cpu_s=10.0), at(150, cpu_s=10.0), at(161, cpu_s=10.1))[-2:] == [
        "working",
        "parked",
    ]


def test_an_idle_runtimes_heartbeat_is_not_work():
    assert watch(*(at(t, cpu_s=1.0 + t * 0.005) for t in range(0, 70, 10)))[-1] == "parked"


def test_unknown_cpu_counts_as_none():
    assert watch(at(0, cpu_s=None), at(61, cpu_s=None))[-1] == "parked"


def test_a_process_that_stays_after_its_last_word_lingers():
    done = {"last_output_at": 10.0, "done_at": 10.0}
    assert watch(at(10, **done), at(12, **done), at(14, **done)) == ["working", "working", "lingering"]


def test_noise_on_the_way_out_does_not_take_the_word_back():
    assert (
        watch(at(10, done_at=10.0), at(12, done_at=10.0, last_output_at=12.0), at(13.5, done_at=10.0))[-1]
        == "lingering"
    )


def test_a_call_after_done_takes_the_word_back():
    later = {"last_call_at": 12.0, "done_at": 10.0}
    assert watch(at(12, **later), at(20, **later))[-1] == "working"


def test_a_call_in_flight_is_never_cut_off_as_lingering():
    assert watch(at(10, done_at=1.0, in_flight=1)) == ["working"]


def test_an_agent_that_was_not_looked_at_counts_as_busy():
    assert watch(at(0), at(30, looked=False, cpu_s=None), at(89), at(91))[-2:] == ["working", "parked"]
