"""What `compile` and `fit` left on a model, once its layers are others."""

import warnings

import keras

from fewbit.keras._variables import sublayers


def forget_compiled(model: keras.Layer) -> None:
    """Drop what Keras compiled for the layers as they were."""
    for each in [model, *sublayers(model)]:
        for name in ("train_function", "test_function", "predict_function", "generate_function"):
            if getattr(each, name, None) is not None:
                setattr(each, name, None)


def renew_optimizers(model: keras.Layer, keep: bool = False) -> None:
    """Optimizers as before their first step: what they had was about floats that are gone.

    With `keep` they go on with what they had, and know the variables that came meanwhile.
    """
    for each in [model, *sublayers(model)]:
        optimizer = getattr(each, "optimizer", None)
        if isinstance(optimizer, keras.optimizers.Optimizer) and optimizer.built:
            with warnings.catch_warnings():  # Keras' own, about NumPy
                warnings.simplefilter("ignore", DeprecationWarning)
                each.optimizer = type(optimizer).from_config(optimizer.get_config())
            each.optimizer.build(each.trainable_variables)
            before = {v.path: v for v in optimizer.variables} if keep else {}
            for variable in each.optimizer.variables:
                if variable.path in before:
                    variable.assign(before[variable.path].value)
