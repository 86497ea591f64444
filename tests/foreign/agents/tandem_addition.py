"""A verifiers taskset: add two digits. The reward is how many vowels are said, which a random model can learn."""

import verifiers.v1 as vf


class AdditionData(vf.TaskData):
    answer: int


class AdditionTask(vf.Task[AdditionData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def vowels(self, trace) -> float:
        said = trace.last_reply or ""
        return sum(said.count(vowel) for vowel in "aeiou") / (len(said) + 1)


class AdditionTaskset(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield AdditionTask(AdditionData(prompt=f"What is {number} + 3?", answer=number + 3), self.config.task)


__all__ = ["AdditionTaskset"]
