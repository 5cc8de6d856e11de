"""The user's methods by concept, as base classes of the Accelerator and of the states. Run in ranks.

Each base class declares what it needs of its host by abstract names; the host owns the parts, which do the work.
"""
