"""Agents of a user's file that speak to the model over HTTP."""

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
