"""Agents of a user's file that speak to the model over HTTP."""

import asyncio

import aiohttp


async def ask(http, base_url, api_key, messages, **fields):
    """The reply's message."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with http.post(f"{base_url}/chat/completions", json={"messages": messages, **fields}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["message"]


async def three_turns(base_url, api_key, data, turns: int = 3):
    """Asks again twice; more vowels are better."""
    messages = list(data["messages"])
    async with aiohttp.ClientSession() as http:
        for _ in range(turns):
            message = await ask(http, base_url, api_key, messages, temperature=0.1)
            messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "Again."}]
    words = " ".join(m["content"] for m in messages if m["role"] == "assistant")
    return {"reward": sum(words.count(vowel) for vowel in "aeiou") / (len(words) + 1), "metrics": {"letters": len(words)}}


async def silent(base_url, api_key, data):
    """Leaves the judgement to the configured reward."""
    async with aiohttp.ClientSession() as http:
        await ask(http, base_url, api_key, data["messages"])


async def branching(base_url, api_key, data):
    """Asks for several turns at once, three of them alike, and goes on from two of these in two ways at once."""
    question = data["messages"]
    async with aiohttp.ClientSession() as http:
        alike = [ask(http, base_url, api_key, question) for _ in range(3)]
        others = [ask(http, base_url, api_key, [*question, {"role": "user", "content": str(i)}]) for i in range(2)]
        first = await asyncio.gather(*alike, *others)
        said = [{"role": "assistant", "content": message["content"]} for message in first]
        further = [[*question, reply, {"role": "user", "content": word}] for reply in said[:2] for word in "ab"]
        second = await asyncio.gather(*(ask(http, base_url, api_key, messages) for messages in further))
    return sum(len(message["content"]) for message in (*first, *second)) / 100
