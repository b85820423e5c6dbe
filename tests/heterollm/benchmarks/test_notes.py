from heterollm.report.tables_bench import lacking_words

NO_PROFILE = "The device 'host' has no profile."
CHOSEN = "device auto chose host"


def test_a_note_on_every_configuration_is_printed_once_without_their_names(make_rows, changed):
    rows = [
        changed(
            make_rows([1000.0], plan_level=level),
            reasons={"predicted_ms": NO_PROFILE, "ceilings": NO_PROFILE},
            notes=(CHOSEN,),
        )
        for level in ("gpu", "tensor", "block")
    ]
    assert list(lacking_words(rows)) == [f"No prediction and no ceilings: {NO_PROFILE}", CHOSEN]
    rows[0] = changed(rows[0], reasons={"ceilings": NO_PROFILE}, notes=())
    others = f"{rows[1].label}, {rows[2].label}"
    assert list(lacking_words(rows)) == [
        f"No prediction of {others}: {NO_PROFILE}",
        f"No ceilings: {NO_PROFILE}",
        f"{others}: {CHOSEN}",
    ]
