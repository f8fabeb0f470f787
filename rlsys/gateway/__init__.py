"""An OpenAI-compatible endpoint for each session, so that any program with an OpenAI client can be trained.

async with shared_gateway() as gateway, gateway.serve(session) as endpoint:
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Sort 312"}])
"""
