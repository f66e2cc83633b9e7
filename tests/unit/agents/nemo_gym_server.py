"""The resources server `example_session_state_mgmt` of NeMo Gym: `nemo_gym_server.py PORT`."""

import sys

import uvicorn
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt import app

port = int(sys.argv[1])
address = {"host": "127.0.0.1", "port": port}
config = app.StatefulCounterResourcesServerConfig(**address, entrypoint="", name="counter")
head = ServerClient(
    head_server_config=BaseServerConfig(**address), global_config_dict=OmegaConf.create()
)
server = app.StatefulCounterResourcesServer(config=config, server_client=head)
uvicorn.run(server.setup_webserver(), port=port)
