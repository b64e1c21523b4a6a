"""Sample action chunks from an OpenPI checkpoint.

    python examples/sample_actions.py path/to/checkpoint/29999 aloha

Uses PaliGemma's tokenizer from OpenPI's cache; for the tiny checkpoints of the tests:

    python examples/sample_actions.py tests/fixtures/openpi/openpi_ckpt_pi0_tiny.tar.gz aloha \\
        --horizon 10 --tokenizer tiny
"""

import argparse

import numpy as np

from pistar.data.robots import example_observation, find_robot
from pistar.errors import UserError
from pistar.policy.load_policy import load_policy


def main() -> None:
    """Load a checkpoint, and sample four candidates for one observation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("robot")
    parser.add_argument("--horizon", type=int, help="actions in a chunk, if not 50 and there is no contract")
    parser.add_argument("--tokenizer")
    args = parser.parse_args()

    try:
        policy = load_policy(args.checkpoint, robot=args.robot, action_horizon=args.horizon, tokenizer=args.tokenizer)
    except UserError as error:
        parser.error(str(error))
    observation = example_observation(find_robot(args.robot), "fold the towel")  # yours: the robot's own dictionary
    (chunks,) = policy.act([observation], policy.draw_noise(0, 1, 4))
    print(f"{chunks.shape[0]} candidates of {chunks.shape[1]} actions with {chunks.shape[2]} numbers each")
    print("first action of each:", np.round(chunks[:, 0], 2), sep="\n")


if __name__ == "__main__":
    main()
