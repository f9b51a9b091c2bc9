"""What happens to a real server when clients, engines and operators misbehave: `make chaos`.

Every answer is compared with the oracle, and every request that was sent is accounted for.
"""
