"""The replicas of an instance: their devices, values and collectives."""
