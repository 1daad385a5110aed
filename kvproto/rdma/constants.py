"""Numbers of the verbs interface. They are its binary interface, the same for every version.

Taken as numbers because pyverbs has moved their names between its generations.
Source: libibverbs/verbs.h.
"""

from enum import IntEnum, IntFlag


class Access(IntFlag):
    """ibv_access_flags: what may be done to registered memory."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 1 << 1
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5


class QpState(IntEnum):
    """ibv_qp_state."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class WcStatus(IntEnum):
    """ibv_wc_status: how a work request ended."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21


class EventType(IntEnum):
    """ibv_event_type: what a device says unasked."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19


# ibv_qp_type, ibv_mw_type
QPT_RC = 2
MW_TYPE_2 = 2
# ibv_port_state
PORT_ACTIVE = 4
# ibv_send_flags
SEND_SIGNALED = 1 << 1
# ibv_wr_opcode
WR_RDMA_WRITE = 0
WR_BIND_MW = 8
# ibv_device_cap_flags
DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24
# ibv_qp_init_attr_mask
INIT_ATTR_PD = 1
INIT_ATTR_SEND_OPS_FLAGS = 1 << 6
# ibv_qp_create_send_ops_flags
SEND_OPS_RDMA_WRITE = 1
SEND_OPS_BIND_MW = 1 << 8
# ibv_qp_attr_mask
QP_STATE = 1

# ibv_mtu: the number of each size.
MTU_CODE = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
MTU_NBYTES = {code: nbytes for nbytes, code in MTU_CODE.items()}
