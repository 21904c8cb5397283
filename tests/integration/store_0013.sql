-- A store as a gateway of revision 0013 wrote it, with rows in every table: two rewarded episodes of a trained group, one of an
-- evaluation, one abandoned, one open. @RUNS@ stands for the folder of the run. For tests/integration/test_upgrade.py.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0013');
CREATE TABLE answers (
	id VARCHAR(64) NOT NULL, 
	episode_id VARCHAR(40) NOT NULL, 
	api VARCHAR(16) NOT NULL, 
	model VARCHAR(255) NOT NULL, 
	previous VARCHAR(64) NOT NULL, 
	messages JSON NOT NULL, 
	input JSON NOT NULL, 
	answer JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	deleted_at FLOAT, agent VARCHAR(255), asked_model VARCHAR(255), labels TEXT, 
	CONSTRAINT pk_answers PRIMARY KEY (id), 
	CONSTRAINT fk_answers_episode_id FOREIGN KEY(episode_id) REFERENCES episodes (id) ON DELETE CASCADE
);
INSERT INTO "answers" VALUES('chatcmpl-4228d583c13c95cf83b2d19e','ep-04fdbadfee18014ea097','chat','sums','','[]','[{"role":"user","content":"hi"}]','{"id":"chatcmpl-4228d583c13c95cf83b2d19e","created":1795511109,"model":"sums","object":"chat.completion","choices":[{"index":0,"message":{"refusal":null,"role":"assistant","content":"xs��"},"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":21,"completion_tokens":4,"total_tokens":25},"metadata":{"k":"v"}}',1.7955111095884709358e+09,NULL,'','sums','
["k", "v"]
');
INSERT INTO "answers" VALUES('resp_217eec512bade988fa641f3d','ep-04fdbadfee18014ea097','responses','sums','','[{"role":"user","content":"hi"},{"role":"assistant","content":"xs��"}]','[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}],"status":"completed","id":"msg_217eec512bade988fa641f3d_i0"}]','{"id":"resp_217eec512bade988fa641f3d","object":"response","created_at":1795511109,"completed_at":null,"status":"incomplete","error":null,"incomplete_details":{"reason":"max_output_tokens"},"output":[{"id":"msg_217eec512bade988fa641f3d_0","type":"message","status":"incomplete","role":"assistant","content":[{"type":"output_text","text":"xs��","annotations":[],"logprobs":[]}]}],"usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"background":false,"frequency_penalty":0.0,"instructions":null,"max_output_tokens":4,"max_tool_calls":null,"metadata":{},"model":"sums","parallel_tool_calls":true,"presence_penalty":0.0,"previous_response_id":null,"prompt_cache_key":null,"reasoning":{"effort":null,"summary":null},"safety_identifier":null,"service_tier":"default","store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","user":null}',1.7955111097983255386e+09,NULL,'','sums','');
INSERT INTO "answers" VALUES('chatcmpl-54fdf74a1baeebf9ff60227e','ep-e1ec1728250e7e487460','chat','sums','','[]','[{"role":"user","content":"hi"}]','{"id":"chatcmpl-54fdf74a1baeebf9ff60227e","created":1795511109,"model":"sums","object":"chat.completion","choices":[{"index":0,"message":{"refusal":null,"role":"assistant","content":"xs��j"},"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":21,"completion_tokens":5,"total_tokens":26},"metadata":{"k":"v"}}',1.79551110991453480715e+09,NULL,'','sums','
["k", "v"]
');
INSERT INTO "answers" VALUES('resp_b76c7ecfd2ce5d36dc72dd05','ep-e1ec1728250e7e487460','responses','sums','','[{"role":"user","content":"hi"},{"role":"assistant","content":"xs��"}]','[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}],"status":"completed","id":"msg_b76c7ecfd2ce5d36dc72dd05_i0"}]','{"id":"resp_b76c7ecfd2ce5d36dc72dd05","object":"response","created_at":1795511110,"completed_at":null,"status":"incomplete","error":null,"incomplete_details":{"reason":"max_output_tokens"},"output":[{"id":"msg_b76c7ecfd2ce5d36dc72dd05_0","type":"message","status":"incomplete","role":"assistant","content":[{"type":"output_text","text":"xs��","annotations":[],"logprobs":[]}]}],"usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"background":false,"frequency_penalty":0.0,"instructions":null,"max_output_tokens":4,"max_tool_calls":null,"metadata":{},"model":"sums","parallel_tool_calls":true,"presence_penalty":0.0,"previous_response_id":null,"prompt_cache_key":null,"reasoning":{"effort":null,"summary":null},"safety_identifier":null,"service_tier":"default","store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","user":null}',1.79551111010222101214e+09,NULL,'','sums','');
CREATE TABLE "calls" (
	id VARCHAR(64) NOT NULL, 
	episode_id VARCHAR(40) NOT NULL, 
	node INTEGER NOT NULL, 
	api VARCHAR(16) NOT NULL, 
	stream BOOLEAN NOT NULL, 
	asked JSON NOT NULL, 
	used JSON NOT NULL, 
	logprobs_mode VARCHAR(32) NOT NULL, 
	engine VARCHAR(64) NOT NULL, 
	finish_reason VARCHAR(16) NOT NULL, 
	prompt_tokens INTEGER NOT NULL, 
	completion_tokens INTEGER NOT NULL, 
	pauses INTEGER NOT NULL, 
	digest BLOB NOT NULL, 
	received_at FLOAT NOT NULL, 
	first_token_s FLOAT, 
	seconds FLOAT NOT NULL, 
	model VARCHAR(255) NOT NULL, 
	request_key VARCHAR(64) NOT NULL, reward FLOAT, open_to VARCHAR(255), 
	CONSTRAINT pk_calls PRIMARY KEY (id), 
	CONSTRAINT fk_calls_episode_id FOREIGN KEY(episode_id) REFERENCES episodes (id) ON DELETE CASCADE
);
INSERT INTO "calls" VALUES('chatcmpl-4228d583c13c95cf83b2d19e','ep-04fdbadfee18014ea097',1,'chat',0,'{"model":"sums","max_tokens":4,"store":true,"metadata":{"k":"v"}}','{"temperature":1.0,"top_p":1.0,"max_tokens":4,"seed":null,"bridged":false}','processed_logprobs','sums-0','length',21,4,0,X'C87A009A3B6196ACA52D3C90DD0B2B84',1.7955111095884709358e+09,1.10852718353271484375e-02,1.26831531524658203125e-02,'sums','5e47fbe30f387497ac14b03769c9e9405e47fbe30f387497ac14b03769c9e940',NULL,NULL);
INSERT INTO "calls" VALUES('chatcmpl-73a0ff1876cddd117abecb23','ep-04fdbadfee18014ea097',3,'chat',0,'{"model":"sums","max_tokens":4}','{"temperature":1.0,"top_p":1.0,"max_tokens":4,"seed":null,"bridged":true}','processed_logprobs','sums-0','length',50,4,0,X'AC13018659ACC5A4E028F32139117088',1.79551110962558317183e+09,4.36384677886962890625e-02,4.39417362213134765625e-02,'sums','c3822e76a64497494b77520e2af00004c3822e76a64497494b77520e2af00004',NULL,NULL);
INSERT INTO "calls" VALUES('upstream-743b5eb850b1b214c28b2877','ep-04fdbadfee18014ea097',-1,'chat/completions',0,'{"model":"judge"}','{}','','upstream','upstream',0,0,0,X'',1.79551110972233176231e+09,2.987384796142578125e-03,3.03363800048828125e-03,'judge','',NULL,NULL);
INSERT INTO "calls" VALUES('resp_217eec512bade988fa641f3d','ep-04fdbadfee18014ea097',4,'responses',0,'{"model":"sums","max_output_tokens":4}','{"temperature":1.0,"top_p":1.0,"max_tokens":4,"seed":null,"bridged":false}','processed_logprobs','sums-0','length',21,4,0,X'C87A009A3B6196ACA52D3C90DD0B2B84',1.7955111097983255386e+09,1.643657684326171875e-03,1.8470287322998046875e-03,'sums','d50cbb48cfdd8378abb4d908d7b60bb6d50cbb48cfdd8378abb4d908d7b60bb6',NULL,NULL);
INSERT INTO "calls" VALUES('chatcmpl-54fdf74a1baeebf9ff60227e','ep-e1ec1728250e7e487460',1,'chat',0,'{"model":"sums","max_tokens":5,"store":true,"metadata":{"k":"v"}}','{"temperature":1.0,"top_p":1.0,"max_tokens":5,"seed":null,"bridged":false}','processed_logprobs','sums-0','length',21,5,0,X'284F7F405B5423C9946D08533DE2F3FA',1.79551110991453480715e+09,1.624584197998046875e-03,1.86061859130859375e-03,'sums','81d7c64422ae18effaf453a1f7910fd181d7c64422ae18effaf453a1f7910fd1',NULL,NULL);
INSERT INTO "calls" VALUES('chatcmpl-e22da973fb44b22e5316e441','ep-e1ec1728250e7e487460',3,'chat',0,'{"model":"sums","max_tokens":5}','{"temperature":1.0,"top_p":1.0,"max_tokens":5,"seed":null,"bridged":true}','processed_logprobs','sums-0','length',51,5,0,X'4E651D557B1ACE5DCBF6A254940A6A87',1.79551110997449588774e+09,2.064418792724609375e-02,2.0987033843994140625e-02,'sums','9e5f4764b28d04598669b8b43d10c1f29e5f4764b28d04598669b8b43d10c1f2',NULL,NULL);
INSERT INTO "calls" VALUES('upstream-5aa146985f8de7b92eabff1c','ep-e1ec1728250e7e487460',-1,'chat/completions',0,'{"model":"judge"}','{}','','upstream','upstream',0,0,0,X'',1.79551111005250334739e+09,1.263141632080078125e-03,1.3053417205810546875e-03,'judge','',NULL,NULL);
INSERT INTO "calls" VALUES('resp_b76c7ecfd2ce5d36dc72dd05','ep-e1ec1728250e7e487460',4,'responses',0,'{"model":"sums","max_output_tokens":4}','{"temperature":1.0,"top_p":1.0,"max_tokens":4,"seed":null,"bridged":false}','processed_logprobs','sums-0','length',21,4,0,X'C87A009A3B6196ACA52D3C90DD0B2B84',1.79551111010222101214e+09,1.8279552459716796875e-03,0.00205230712890625,'sums','d50cbb48cfdd8378abb4d908d7b60bb6d50cbb48cfdd8378abb4d908d7b60bb6',NULL,NULL);
INSERT INTO "calls" VALUES('chatcmpl-69ce08fce90cef12510ccb15','ep-808453056450173f602c',1,'chat',0,'{"model":"sums","max_tokens":5}','{"temperature":1.0,"top_p":1.0,"max_tokens":5,"seed":null,"bridged":false}','processed_logprobs','sums-0','length',21,5,0,X'284F7F405B5423C9946D08533DE2F3FA',1.79551111205033850672e+09,1.681804656982421875e-03,1.8863677978515625e-03,'sums','e58c112a7a1f4c24b5d7bcbe49927592e58c112a7a1f4c24b5d7bcbe49927592',NULL,NULL);
CREATE TABLE coordinator (
	name VARCHAR(16) NOT NULL, 
	fence BIGINT NOT NULL, 
	holder VARCHAR(64) NOT NULL, 
	url TEXT NOT NULL, 
	deadline FLOAT NOT NULL, 
	CONSTRAINT pk_coordinator PRIMARY KEY (name)
);
INSERT INTO "coordinator" VALUES('control',1,'gateway-1','http://127.0.0.1:8000',1.79551111311500549315e+09);
CREATE TABLE decisions (
	seq INTEGER NOT NULL, 
	model VARCHAR(255) NOT NULL, 
	at FLOAT NOT NULL, 
	group_id VARCHAR(255) NOT NULL, 
	episode_id VARCHAR(40) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	reason VARCHAR(255) NOT NULL, 
	buffer INTEGER, 
	entry INTEGER, 
	details JSON NOT NULL, 
	CONSTRAINT pk_decisions PRIMARY KEY (seq)
);
INSERT INTO "decisions" VALUES(1,'sums',1.79551110955201244359e+09,'g1','ep-04fdbadfee18014ea097','admitted','',1,NULL,'{"version":0}');
INSERT INTO "decisions" VALUES(2,'sums',1.79551110989001083372e+09,'g1','ep-e1ec1728250e7e487460','admitted','',1,NULL,'{"version":0}');
INSERT INTO "decisions" VALUES(3,'sums',1.79551111018701195715e+09,'g1','ep-04fdbadfee18014ea097','rewarded','',NULL,NULL,'{"value":0.0}');
INSERT INTO "decisions" VALUES(4,'sums',1.79551111027399587635e+09,'g1','ep-e1ec1728250e7e487460','rewarded','',NULL,NULL,'{"value":1.0}');
INSERT INTO "decisions" VALUES(5,'sums',1.79551111027399587635e+09,'g1','','occupied','',0,0,'{}');
INSERT INTO "decisions" VALUES(6,'sums',1.79551111063098454479e+09,'task-3-d63e9b595322','ep-a2a5fb0b0b291a0dcfc1','admitted','',1,NULL,'{"version":0}');
INSERT INTO "decisions" VALUES(7,'sums',1.79551111067998862263e+09,'task-3-d63e9b595322','ep-a2a5fb0b0b291a0dcfc1','dropped','agent_failed',NULL,NULL,'{"error":"boom"}');
INSERT INTO "decisions" VALUES(8,'sums',1.79551111067998862263e+09,'task-3-d63e9b595322','','dropped','too_few_rewards',NULL,NULL,'{}');
INSERT INTO "decisions" VALUES(9,'sums',1.79551111135099673269e+09,'g1','','trained','',0,0,'{"version":0,"episodes":["ep-04fdbadfee18014ea097","ep-e1ec1728250e7e487460"]}');
INSERT INTO "decisions" VALUES(10,'sums',1.79551111199601435663e+09,'g2','ep-808453056450173f602c','admitted','',2,NULL,'{"version":1}');
CREATE TABLE episodes (
	id VARCHAR(40) NOT NULL, 
	key_hash VARCHAR(64) NOT NULL, 
	task_id VARCHAR(255) NOT NULL, 
	group_id VARCHAR(255) NOT NULL, 
	mode VARCHAR(8) NOT NULL, 
	model VARCHAR(255) NOT NULL, 
	details JSON NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	reward FLOAT, 
	components JSON, 
	created_at FLOAT NOT NULL, 
	closed_at FLOAT, agent VARCHAR(255) DEFAULT '' NOT NULL, notice VARCHAR(64) DEFAULT '' NOT NULL, error TEXT DEFAULT '' NOT NULL, sampling JSON, 
	CONSTRAINT pk_episodes PRIMARY KEY (id), 
	CONSTRAINT uq_episodes_key_hash UNIQUE (key_hash)
);
INSERT INTO "episodes" VALUES('ep-04fdbadfee18014ea097','8629530648e66f52a7190156c2190f10c267aaf9203c03f1d1813d8ec7f7d8ba','task-1','g1','train','sums','{}',0,'closed','rewarded',0.0,'null',1.79551110954204225537e+09,1.79551111018600606916e+09,'','','',NULL);
INSERT INTO "episodes" VALUES('ep-e1ec1728250e7e487460','21570a214a83628f1c3b7b69f61edf3e7ac0e24045b147d5aaa28cf310d4a35e','task-1','g1','train','sums','{}',0,'closed','rewarded',1.0,'null',1.79551110988451099398e+09,1.79551111027299022679e+09,'','','',NULL);
INSERT INTO "episodes" VALUES('ep-28846aeeb039ea31a889','11a213bcdb12d29e487fcfec76deb267575d36692fe06b438072b81ac11fa6e4','task-2','task-2-ac0f2fd79e4f','eval','sums','{}',0,'closed','rewarded',0.5,'null',1.79551111028256773953e+09,1.79551111038898229595e+09,'','','',NULL);
INSERT INTO "episodes" VALUES('ep-a2a5fb0b0b291a0dcfc1','44168ee9b28f403fde47d0fdaa071375fbb00dddbf32e15485662b0462c40af7','task-3','task-3-d63e9b595322','train','sums','{}',0,'closed','agent_failed',NULL,NULL,1.79551111063061904909e+09,1.79551111067998862263e+09,'','','boom',NULL);
INSERT INTO "episodes" VALUES('ep-808453056450173f602c','09c241f155a2e700c59944b2dabf58317f69005d910fe868a689da0f7195d896','task-4','g2','train','sums','{}',1,'open','',NULL,NULL,1.79551111199470877642e+09,NULL,'','','',NULL);
CREATE TABLE events (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at FLOAT NOT NULL, 
	kind VARCHAR(64) NOT NULL, 
	model VARCHAR(255) NOT NULL, 
	episode_id VARCHAR(40) NOT NULL, 
	group_id VARCHAR(255) NOT NULL, 
	data JSON NOT NULL
);
INSERT INTO "events" VALUES(1,1.79551110822399711611e+09,'version.live','sums','','','{"version":0,"parent":null}');
INSERT INTO "events" VALUES(2,1.79551110955201244359e+09,'episode.opened','sums','ep-04fdbadfee18014ea097','g1','{"task_id":"task-1","mode":"train","version":0}');
INSERT INTO "events" VALUES(3,1.79551110955201244359e+09,'episode.admitted','sums','ep-04fdbadfee18014ea097','g1','{"buffer":1,"version":0}');
INSERT INTO "events" VALUES(4,1.79551110989001083372e+09,'episode.opened','sums','ep-e1ec1728250e7e487460','g1','{"task_id":"task-1","mode":"train","version":0}');
INSERT INTO "events" VALUES(5,1.79551110989001083372e+09,'episode.admitted','sums','ep-e1ec1728250e7e487460','g1','{"buffer":1,"version":0}');
INSERT INTO "events" VALUES(6,1.79551111018701195715e+09,'episode.closed','sums','ep-04fdbadfee18014ea097','g1','{"task_id":"task-1","mode":"train","version":0,"reason":"rewarded","reward":0.0}');
INSERT INTO "events" VALUES(7,1.79551111018701195715e+09,'episode.rewarded','sums','ep-04fdbadfee18014ea097','g1','{"value":0.0}');
INSERT INTO "events" VALUES(8,1.79551111027399587635e+09,'episode.closed','sums','ep-e1ec1728250e7e487460','g1','{"task_id":"task-1","mode":"train","version":0,"reason":"rewarded","reward":1.0}');
INSERT INTO "events" VALUES(9,1.79551111027399587635e+09,'episode.rewarded','sums','ep-e1ec1728250e7e487460','g1','{"value":1.0}');
INSERT INTO "events" VALUES(10,1.79551111027399587635e+09,'group.occupied','sums','','g1','{"buffer":0,"entry":0}');
INSERT INTO "events" VALUES(11,1.79551111028300809865e+09,'episode.opened','sums','ep-28846aeeb039ea31a889','task-2-ac0f2fd79e4f','{"task_id":"task-2","mode":"eval","version":0}');
INSERT INTO "events" VALUES(12,1.79551111034899044038e+09,'engine.open','sums','','','{"engine":"sums-0","state":"open","version":0,"reason":""}');
INSERT INTO "events" VALUES(13,1.79551111038998818403e+09,'episode.closed','sums','ep-28846aeeb039ea31a889','task-2-ac0f2fd79e4f','{"task_id":"task-2","mode":"eval","version":0,"reason":"rewarded","reward":0.5}');
INSERT INTO "events" VALUES(14,1.79551111063199043274e+09,'episode.opened','sums','ep-a2a5fb0b0b291a0dcfc1','task-3-d63e9b595322','{"task_id":"task-3","mode":"train","version":0}');
INSERT INTO "events" VALUES(15,1.79551111063199043274e+09,'episode.admitted','sums','ep-a2a5fb0b0b291a0dcfc1','task-3-d63e9b595322','{"buffer":1,"version":0}');
INSERT INTO "events" VALUES(16,1.79551111067998862263e+09,'episode.closed','sums','ep-a2a5fb0b0b291a0dcfc1','task-3-d63e9b595322','{"task_id":"task-3","mode":"train","version":0,"reason":"agent_failed","reward":null}');
INSERT INTO "events" VALUES(17,1.79551111067998862263e+09,'episode.dropped','sums','ep-a2a5fb0b0b291a0dcfc1','task-3-d63e9b595322','{"reason":"agent_failed","error":"boom"}');
INSERT INTO "events" VALUES(18,1.79551111067998862263e+09,'group.dropped','sums','','task-3-d63e9b595322','{"reason":"too_few_rewards"}');
INSERT INTO "events" VALUES(19,1.79551111075800061229e+09,'batch.leased','sums','','','{"lease_id":"lease-7b4c93b315e7bb95","buffer":0,"fence":1,"consumer":"trainer"}');
INSERT INTO "events" VALUES(20,1.79551111135099673269e+09,'batch.acked','sums','','','{"lease_id":"lease-7b4c93b315e7bb95","buffer":0,"fence":1,"consumer":"trainer","checkpoint":"ckpt"}');
INSERT INTO "events" VALUES(21,1.79551111135099673269e+09,'group.trained','sums','','g1','{"buffer":0,"entry":0,"version":0,"episodes":["ep-04fdbadfee18014ea097","ep-e1ec1728250e7e487460"]}');
INSERT INTO "events" VALUES(22,1.79551111143898677827e+09,'version.published','sums','','','{"version":1,"parent":0}');
INSERT INTO "events" VALUES(23,1.79551111161798381803e+09,'version.live','sums','','','{"version":1,"report":[{"engine":"sums-0","version":1,"streams":0,"pinned":0,"seconds":{"hold":0.0001,"abort":0.0006,"settle":0.0,"load":0.0434,"label":0.1117,"resume":0.0006,"probe":0.0,"open":0.0001},"probe":null,"failure":""}]}');
INSERT INTO "events" VALUES(24,1.79551111192299127578e+09,'trainer.step','sums','','','{"step":1,"version":1,"figures":{"reward_mean":0.5}}');
INSERT INTO "events" VALUES(25,1.79551111199601435663e+09,'episode.opened','sums','ep-808453056450173f602c','g2','{"task_id":"task-4","mode":"train","version":1}');
INSERT INTO "events" VALUES(26,1.79551111199601435663e+09,'episode.admitted','sums','ep-808453056450173f602c','g2','{"buffer":2,"version":1}');
CREATE TABLE exchanges (
	call_id VARCHAR(64) NOT NULL, 
	request JSON NOT NULL, 
	status INTEGER NOT NULL, 
	response TEXT NOT NULL, 
	CONSTRAINT pk_exchanges PRIMARY KEY (call_id), 
	CONSTRAINT fk_exchanges_call_id FOREIGN KEY(call_id) REFERENCES calls (id) ON DELETE CASCADE
);
INSERT INTO "exchanges" VALUES('upstream-743b5eb850b1b214c28b2877','{"model":"judge","messages":[{"role":"user","content":"good?"}]}',200,'{"id": "x", "object": "chat.completion", "created": 1, "model": "big", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Guten Tag"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}');
INSERT INTO "exchanges" VALUES('upstream-5aa146985f8de7b92eabff1c','{"model":"judge","messages":[{"role":"user","content":"good?"}]}',200,'{"id": "x", "object": "chat.completion", "created": 1, "model": "big", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Guten Tag"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}');
CREATE TABLE "leases" (
	fence INTEGER NOT NULL, 
	id VARCHAR(40) NOT NULL, 
	buffer INTEGER NOT NULL, 
	consumer VARCHAR(255) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	checkpoint TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	model VARCHAR(255) NOT NULL, 
	deadline FLOAT NOT NULL, 
	CONSTRAINT pk_leases PRIMARY KEY (model, fence), 
	CONSTRAINT uq_leases_id UNIQUE (id)
);
INSERT INTO "leases" VALUES(1,'lease-7b4c93b315e7bb95',0,'trainer','acked','ckpt','',1.79551111075800061229e+09,'sums',1.79551123075800061219e+09);
CREATE TABLE "ledger_events" (
	seq INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	event JSON NOT NULL, 
	commands JSON NOT NULL, 
	model VARCHAR(255) NOT NULL, 
	CONSTRAINT pk_ledger_events PRIMARY KEY (seq)
);
INSERT INTO "ledger_events" VALUES(1,1.79551110815085840227e+09,'{"type":"Settings","eta":1,"batch":1,"min_members":1,"rule":"staleflow","spare_groups":0,"spare_members":0,"drop_equal":false,"late":"cancel","stuck_groups":4,"equal_within":1e-6}','[]','sums');
INSERT INTO "ledger_events" VALUES(2,1.79551110954710578916e+09,'{"type":"Join","group_id":"g1","episode_id":"ep-04fdbadfee18014ea097","size":2}','[{"type":"Admit","episode_id":"ep-04fdbadfee18014ea097","group_id":"g1","buffer":1,"version":0}]','sums');
INSERT INTO "ledger_events" VALUES(3,1.79551110989006280894e+09,'{"type":"Join","group_id":"g1","episode_id":"ep-e1ec1728250e7e487460","size":2}','[{"type":"Admit","episode_id":"ep-e1ec1728250e7e487460","group_id":"g1","buffer":1,"version":0}]','sums');
INSERT INTO "ledger_events" VALUES(4,1.7955111101874439716e+09,'{"type":"Reward","episode_id":"ep-04fdbadfee18014ea097","value":0.0}','[]','sums');
INSERT INTO "ledger_events" VALUES(5,1.79551111027438759807e+09,'{"type":"Reward","episode_id":"ep-e1ec1728250e7e487460","value":1.0}','[{"type":"Occupied","group_id":"g1","buffer":0,"entry":0},{"type":"BufferReady","buffer":0}]','sums');
INSERT INTO "ledger_events" VALUES(6,1.79551111063185787203e+09,'{"type":"Join","group_id":"task-3-d63e9b595322","episode_id":"ep-a2a5fb0b0b291a0dcfc1","size":1}','[{"type":"Admit","episode_id":"ep-a2a5fb0b0b291a0dcfc1","group_id":"task-3-d63e9b595322","buffer":1,"version":0}]','sums');
INSERT INTO "ledger_events" VALUES(7,1.79551111068055725098e+09,'{"type":"Drop","episode_id":"ep-a2a5fb0b0b291a0dcfc1","reason":"agent_failed"}','[{"type":"MemberDropped","episode_id":"ep-a2a5fb0b0b291a0dcfc1","reason":"agent_failed"},{"type":"GroupDropped","group_id":"task-3-d63e9b595322","reason":"too_few_rewards"}]','sums');
INSERT INTO "ledger_events" VALUES(8,1.79551111075816106801e+09,'{"type":"Leased","buffer":0}','[]','sums');
INSERT INTO "ledger_events" VALUES(9,1.7955111113515675068e+09,'{"type":"Consume","buffer":0}','[{"type":"Consumed","buffer":0,"group_ids":["g1"]}]','sums');
INSERT INTO "ledger_events" VALUES(10,1.79551111161819410325e+09,'{"type":"Publish","version":1}','[]','sums');
INSERT INTO "ledger_events" VALUES(11,1.79551111199620556826e+09,'{"type":"Join","group_id":"g2","episode_id":"ep-808453056450173f602c","size":2}','[{"type":"Admit","episode_id":"ep-808453056450173f602c","group_id":"g2","buffer":2,"version":1}]','sums');
CREATE TABLE "nodes" (
	episode_id VARCHAR(40) NOT NULL, 
	"index" INTEGER NOT NULL, 
	parent INTEGER NOT NULL, 
	at INTEGER NOT NULL, 
	sampled BOOLEAN NOT NULL, 
	ids BLOB NOT NULL, 
	logprobs BLOB NOT NULL, 
	spans JSON NOT NULL, 
	flags BLOB NOT NULL, 
	temperature FLOAT NOT NULL, 
	mask_reason VARCHAR(64) NOT NULL, 
	call_id VARCHAR(64) NOT NULL, 
	model VARCHAR(255) NOT NULL, 
	CONSTRAINT pk_nodes PRIMARY KEY (episode_id, model, "index"), 
	CONSTRAINT fk_nodes_episode_id FOREIGN KEY(episode_id) REFERENCES episodes (id) ON DELETE CASCADE
);
INSERT INTO "nodes" VALUES('ep-04fdbadfee18014ea097',0,-1,0,0,X'0101000054000000520000004400000051000000C6000000470000004800000002010000C600000001010000400000005200000052000000480000005200000053000000400000004D00000053000000C6000000',X'','[]',X'',1.0,'','','sums');
INSERT INTO "nodes" VALUES('ep-04fdbadfee18014ea097',1,0,21,1,X'5700000052000000B7000000A5000000',X'27807BC03AE4ACC00F1CA9C0B9CC2FBF','[[0,4]]',X'00000000',1.0,'','chatcmpl-4228d583c13c95cf83b2d19e','sums');
INSERT INTO "nodes" VALUES('ep-04fdbadfee18014ea097',2,1,4,0,X'02010000C60000000101000054000000520000004400000051000000C6000000400000004D000000430000001E00000002010000C600000001010000400000005200000052000000480000005200000053000000400000004D00000053000000C6000000',X'','[]',X'',1.0,'','','sums');
INSERT INTO "nodes" VALUES('ep-04fdbadfee18014ea097',3,2,25,1,X'1E000000D60000002C000000E3000000',X'926847C00AB857C0062293C001B155C0','[[0,4]]',X'00000000',1.0,'','chatcmpl-73a0ff1876cddd117abecb23','sums');
INSERT INTO "nodes" VALUES('ep-04fdbadfee18014ea097',4,0,21,1,X'5700000052000000B7000000A5000000',X'27807BC03AE4ACC00F1CA9C0B9CC2FBF','[[0,4]]',X'00000000',1.0,'','resp_217eec512bade988fa641f3d','sums');
INSERT INTO "nodes" VALUES('ep-e1ec1728250e7e487460',0,-1,0,0,X'0101000054000000520000004400000051000000C6000000470000004800000002010000C600000001010000400000005200000052000000480000005200000053000000400000004D00000053000000C6000000',X'','[]',X'',1.0,'','','sums');
INSERT INTO "nodes" VALUES('ep-e1ec1728250e7e487460',1,0,21,1,X'5700000052000000B7000000A500000049000000',X'27807BC03AE4ACC00F1CA9C0B9CC2FBF7CA270BF','[[0,5]]',X'0000000000',1.0,'','chatcmpl-54fdf74a1baeebf9ff60227e','sums');
INSERT INTO "nodes" VALUES('ep-e1ec1728250e7e487460',2,1,5,0,X'02010000C60000000101000054000000520000004400000051000000C6000000400000004D000000430000001E00000002010000C600000001010000400000005200000052000000480000005200000053000000400000004D00000053000000C6000000',X'','[]',X'',1.0,'','','sums');
INSERT INTO "nodes" VALUES('ep-e1ec1728250e7e487460',3,2,25,1,X'9800000019000000C6000000AA00000038000000',X'8CB179C035C0A5C0EFEF25C00AD3B9C0FBD77CC0','[[0,5]]',X'0000000000',1.0,'','chatcmpl-e22da973fb44b22e5316e441','sums');
INSERT INTO "nodes" VALUES('ep-e1ec1728250e7e487460',4,0,21,1,X'5700000052000000B7000000A5000000',X'27807BC03AE4ACC00F1CA9C0B9CC2FBF','[[0,4]]',X'00000000',1.0,'','resp_b76c7ecfd2ce5d36dc72dd05','sums');
INSERT INTO "nodes" VALUES('ep-808453056450173f602c',0,-1,0,0,X'0101000054000000520000004400000051000000C6000000470000004800000002010000C600000001010000400000005200000052000000480000005200000053000000400000004D00000053000000C6000000',X'','[]',X'',1.0,'','','sums');
INSERT INTO "nodes" VALUES('ep-808453056450173f602c',1,0,21,1,X'5700000052000000B7000000A500000049000000',X'27807BC03AE4ACC00F1CA9C0B9CC2FBF7CA270BF','[[1,5]]',X'0000000000',1.0,'','chatcmpl-69ce08fce90cef12510ccb15','sums');
CREATE TABLE retries (
	episode_id VARCHAR(40) NOT NULL, 
	name VARCHAR(32) NOT NULL, 
	call_id VARCHAR(64) NOT NULL, 
	at FLOAT NOT NULL, 
	CONSTRAINT pk_retries PRIMARY KEY (episode_id, name), 
	CONSTRAINT fk_retries_episode_id FOREIGN KEY(episode_id) REFERENCES episodes (id) ON DELETE CASCADE
);
CREATE TABLE tallies (
	model VARCHAR(255) NOT NULL, 
	mode VARCHAR(8) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	count BIGINT NOT NULL, 
	CONSTRAINT pk_tallies PRIMARY KEY (model, mode, state, reason)
);
INSERT INTO "tallies" VALUES('sums','train','open','',1);
INSERT INTO "tallies" VALUES('sums','train','closed','rewarded',2);
INSERT INTO "tallies" VALUES('sums','eval','open','',0);
INSERT INTO "tallies" VALUES('sums','eval','closed','rewarded',1);
INSERT INTO "tallies" VALUES('sums','train','closed','agent_failed',1);
CREATE TABLE "versions" (
	version INTEGER NOT NULL, 
	parent INTEGER, 
	path TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	report JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	model VARCHAR(255) NOT NULL, bad TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_versions PRIMARY KEY (model, version)
);
INSERT INTO "versions" VALUES(0,NULL,'@RUNS@/model','live','[]',1.79551110822395467757e+09,'sums','');
INSERT INTO "versions" VALUES(1,0,'@RUNS@/v1','live','[{"engine":"sums-0","version":1,"streams":0,"pinned":0,"seconds":{"hold":0.0001,"abort":0.0006,"settle":0.0,"load":0.0434,"label":0.1117,"resume":0.0006,"probe":0.0,"open":0.0001},"probe":null,"failure":""}]',1.79551111143973565103e+09,'sums','');
CREATE TABLE writers (
	id VARCHAR(40) NOT NULL, 
	number BIGINT NOT NULL, 
	at FLOAT NOT NULL, 
	CONSTRAINT pk_writers PRIMARY KEY (id)
);
CREATE INDEX ix_episodes_group ON episodes (group_id);
CREATE INDEX ix_calls_request_key ON calls (episode_id, request_key);
CREATE INDEX ix_decisions_episode ON decisions (episode_id);
CREATE INDEX ix_answers_episode ON answers (episode_id, created_at);
CREATE INDEX ix_episodes_created ON episodes (created_at, id);
CREATE INDEX ix_episodes_closed ON episodes (closed_at, id);
CREATE INDEX ix_episodes_state ON episodes (state, created_at, id);
CREATE INDEX ix_episodes_mode ON episodes (mode, created_at, id);
CREATE INDEX ix_episodes_model ON episodes (model, created_at, id);
CREATE INDEX ix_episodes_task ON episodes (task_id, created_at, id);
CREATE INDEX ix_episodes_agent ON episodes (agent, created_at, id);
CREATE INDEX ix_episodes_unfinished ON episodes (id) WHERE state <> 'closed';
CREATE INDEX ix_calls_open ON calls (open_to, digest) WHERE open_to IS NOT NULL;
CREATE INDEX ix_decisions_group ON decisions (group_id, episode_id);
CREATE INDEX ix_decisions_trained ON decisions (model, buffer, entry) WHERE kind = 'trained';
CREATE INDEX ix_decisions_alone ON decisions (at) WHERE kind IN ('refused', 'deleted');
CREATE INDEX ix_ledger_events_model ON ledger_events (model, seq);
CREATE INDEX ix_answers_previous ON answers (previous) WHERE previous <> '';
CREATE INDEX ix_answers_agent ON answers (agent, api, created_at, id) WHERE deleted_at IS NULL;
CREATE INDEX ix_answers_unlisted ON answers (id) WHERE labels IS NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',26);
INSERT INTO "retries" VALUES('ep-04fdbadfee18014ea097','0123456789abcdef','chatcmpl-4228d583c13c95cf83b2d19e',1795511109.5);
INSERT INTO "writers" VALUES('gateway-1',7,1795511109.5);
COMMIT;
