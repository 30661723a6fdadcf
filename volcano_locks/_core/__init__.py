"""Decides, performs nothing: leases as generators of effects, for any driver.

Time and chance come in as values, so every decision can be replayed in a test. A hold's life:

    campaign --Send acquire--> 409 --Send get, Sleep--> again       (flows.campaign)
        | 201
        v
      Tenure --Sleep ttl/3, Send renew--> 200: a later Tenure       (flows.keep)
        |            | 429, 5xx, silence: again until one second before the expiry
        |            | 409, 401, 403, 400: lost at once
        v            v
      leave        Loss -> the body is told to stop, one second before anybody else may lead
        |            |
        +--> renew down to min_hold, or Send release                (flows.leave)
"""
