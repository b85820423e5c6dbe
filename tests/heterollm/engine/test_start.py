from heterollm import LLM
from heterollm.data import bundled_model
from heterollm.engine import runner


def test_short_prompts_have_run_once_a_model_is_loaded(monkeypatch):
    """Kernels of few tokens, some and many are compiled and loaded before the first answer."""
    seen = []
    chunk, one = runner.Engine._chunk, runner.Engine._one_token

    def observed_chunk(engine, cache, position, tokens, *rest):
        seen.append(len(tokens))
        return chunk(engine, cache, position, tokens, *rest)

    def observed_one(engine, *rest):
        seen.append("decode")
        return one(engine, *rest)

    monkeypatch.setattr(runner.Engine, "_chunk", observed_chunk)
    monkeypatch.setattr(runner.Engine, "_one_token", observed_one)
    with LLM.load(bundled_model(), device="host", plan="gpu", context=64) as llm:
        assert seen == [2, 5, 16, "decode"]
        first = llm.generate([1, 2, 3], max_new_tokens=4)
        assert first.token_ids == llm.generate([1, 2, 3], max_new_tokens=4, session=llm.session()).token_ids
    seen.clear()
    with LLM.load(bundled_model(), device="host", plan="gpu", context=4, trace=True) as llm:
        assert seen == []  # a trace holds the user's passes alone
        assert llm.generate([1, 2], max_new_tokens=1).token_ids
    with LLM.load(bundled_model(), device="host", plan="gpu", context=2) as llm:
        assert seen[1:] == ["decode"]
