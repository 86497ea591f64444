"""Anthropic's SDK with its own loop over tools, whole and streamed."""

import asyncio
import json
import sys

from anthropic import AsyncAnthropic, beta_async_tool


@beta_async_tool
async def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


async def episode(session, kind):
    client = AsyncAnthropic(base_url=session["base_url"].removesuffix("/v1"), api_key=session["key"])
    runner = client.beta.messages.tool_runner(
        model="policy",
        max_tokens=1024,
        system="Use the tool.",
        tools=[add],
        messages=[{"role": "user", "content": session["question"]}],
        stream=kind == "stream",
    )
    async for message in runner:
        if kind == "stream":
            async for _ in message:
                pass
            message = await message.get_final_message()
    return "".join(block.text for block in message.content if block.type == "text")


async def main(kind, sessions):
    return await asyncio.gather(*(episode(session, kind) for session in sessions))


print(json.dumps(asyncio.run(main(sys.argv[1], json.load(sys.stdin)))))
