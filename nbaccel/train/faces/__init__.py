"""The user's methods by concept, as base classes of the Accelerator and of the states. Run in ranks; parts do the work.

A face says what it needs of its host by abstract names; the host owns the parts.
"""
