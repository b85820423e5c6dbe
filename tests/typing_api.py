"""The README's calls as a user would type them, checked by mypy and never run."""

from heterollm.engine import Session
from heterollm.llm import LLM
from heterollm.text import GenerationResult
from heterollm.trace import summarise


def generate(folder: str) -> str:
    with LLM.load(folder, device="host", plan="layer", precision="w4a16", group_size=64) as llm:
        result: GenerationResult = llm.generate("import os", max_new_tokens=8)
        for step in llm.stream("def ", max_new_tokens=8, temperature=0.7, seed=1):
            text: str = step.text
        answer: GenerationResult = llm.chat(
            [{"role": "user", "content": "Hi"}], session=llm.session(), stop=["\n"]
        )
        ids: list[int] = llm.tokenizer.encode(answer.text)
        print(ids, llm.config.vocab_size)
        llm.generate("x", max_tokens=8)  # type: ignore[call-arg]  # an unknown option is an error here too
        session: Session = llm.session()
        row = session.prefill([1, 2, 3])
        best: int = int(row.argmax())
        rows = session.decode([best, best])
        other = session.fork()
        other.truncate(2)
        overlap_us: float = summarise(llm.take_trace()).overlap_us
        for name, tensor in llm.reference_state_dict():
            print(name, tensor.shape, rows.shape, text, overlap_us)
    return result.text
